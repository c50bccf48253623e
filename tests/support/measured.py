"""What an answer of a test took: figures of no importance."""

MEASURED = {
    "kv_bytes": 10,
    "dense_kv_bytes": 20,
    "region_bytes": 5,
    "region_dense_bytes": 10,
    "index_bytes": 0,
    "entries_before": 40,
    "entries_after": 10,
    "values_after": 5.0,
    "kept_visual": None,
    "new_tokens": 1,
    "batch_size": 1,
    "prefill_seconds": 0.0,
    "decode_seconds": 0.0,
}
