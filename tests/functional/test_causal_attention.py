"""Rows at the end of what they see, against plain softmax."""

import pytest
import torch

from subtoken_train.functional.causal_attention import Seen, causal_attention


@pytest.mark.parametrize("block", [1, 3, 100])
@pytest.mark.parametrize("rows", [1, 5, 11])
def test_it_is_softmax_over_what_stands_before(rows, block):
    """Grouped heads, padding on either side, rows that see nothing but themselves."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, rows, 8, generator=generator)
    key, value = torch.randn(2, 3, 2, 11, 8, generator=generator).unbind(0)
    seen = torch.ones(3, 11).bool()
    seen[0, :6], seen[1, 7:], seen[2] = False, False, torch.arange(11) % 2 == 0
    found = causal_attention(query, key, value, Seen(seen), 0.3, block)
    for sample in range(3):
        for row in range(rows):
            place = 11 - rows + row
            columns = [i for i in range(place + 1) if seen[sample, i] or i == place]
            for head in range(4):
                logits = 0.3 * key[sample, head // 2, columns] @ query[sample, head, row]
                expected = logits.softmax(0) @ value[sample, head // 2, columns]
                assert torch.allclose(found[sample, head, row], expected, atol=1e-5)
