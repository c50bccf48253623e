"""``subtoken-train export``: any checkpoint or adapter as an adapter folder, merged weights, or a Hub repository."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subtoken_train.artifact.whole_folder import CONFIG_FILE, PICTURE_FILE, RECIPE_FILE, check_target
from subtoken_train.cli.command_line import check_unused
from subtoken_train.cli.recipe_source import read_source
from subtoken_train.cli.terminal import quiet_libraries
from subtoken_train.documents import check_regular, real_path
from subtoken_train.errors import UncutError, shell_words
from subtoken_train.outputs import check_place
from subtoken_train.training.checkpoints import newest_complete, read_marker

if TYPE_CHECKING:
    from peft import PeftModel

    from subtoken_train.artifact.config import AdapterConfig
    from subtoken_train.artifact.hub import Destination
    from subtoken_train.engine.compressed_backbone import CompressedBackbone


HELP = """Write an adapter folder from a run, one of its checkpoints, or an adapter, and publish it on request.

  subtoken-train export runs/mine OUT                                 the run's adapter, else its newest checkpoint
  subtoken-train export runs/mine/checkpoints/step-500 OUT            any checkpoint, whatever strategy wrote it
  subtoken-train export runs/mine OUT --push-to-hub user/name --metrics scores.json
  subtoken-train export runs/mine OUT --merge-lora                    a plain transformers checkpoint, and the routers

The backbone's weights are read only for --merge-lora. Name, token and permission are checked before anything is
written, and a failed push leaves OUT in place."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN_OR_CKPT", help="run, checkpoint or adapter folder")
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="rename the adapter folder OUT to OUT.1")
    named = "Hub id or folder to name as the backbone; its shapes must fit"
    parser.add_argument("--backbone", metavar="PATH", help=named)
    parser.add_argument("--metrics", metavar="FILE", help="scores for the model card, from evaluate --out")
    parser.add_argument("--merge-lora", action="store_true", help="merge the LoRA into the backbone's weights")
    parser.add_argument("--push-to-hub", metavar="USER/NAME", help="publish OUT there")
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to push to (default: main)")
    parser.add_argument("--message", metavar="TEXT", help="message of the commit")


def run(args: argparse.Namespace) -> int:
    publishing = "only applies when publishing; add --push-to-hub user/name, or leave it out"
    check_unused(args, () if args.push_to_hub else ("private", "revision", "message"), publishing)
    out, source = Path(args.out), find_source(Path(args.source))
    if real_path(source.folder) in real_path(out).parents:
        raise ValueError(f"{out} lies inside {source.folder}, which is being exported; choose a folder outside it")
    recipe = read_source([] if source.recipe is None else ["--config", str(source.recipe)])
    check_target(out, args.overwrite)
    check_place(out)
    quiet_libraries()
    from peft import get_peft_model_state_dict

    from subtoken_train.artifact.config import read_config
    from subtoken_train.artifact.folder import put_lora, write_adapter, write_merged
    from subtoken_train.artifact.hub import Destination, check_destination, check_published
    from subtoken_train.cli.recipe import RecipeCLI
    from subtoken_train.cli.run_plan import card_sections
    from subtoken_train.engine.build import build

    cli: Any = None if source.recipe is None else RecipeCLI(recipe)
    destination = None
    if args.push_to_hub is not None:
        destination = Destination(args.push_to_hub, args.private, args.revision, args.message)
        if not args.merge_lora:  # a merged folder holds its own
            named = read_config(source.folder).backbone if source.is_adapter else cli.model.backbone_config
            check_published(args.backbone or str(named.path))
        check_destination(destination)
    config, parts, peft_model = _read_parts(source, cli, args.backbone)
    name = str(config.training.get("name", source.folder.name))
    sections = card_sections(cli, parts, source.recipe, name, args.metrics, args.push_to_hub)
    sections = replace(sections, picture=source.picture())
    if args.merge_lora:
        loaded, loaded_peft = build(config.backbone, config.lora, config.reducer, config.routing, config.stage2)
        for adapter in peft_model.peft_config:
            tensors = get_peft_model_state_dict(peft_model, adapter_name=adapter, save_embedding_layers=False)
            put_lora(loaded_peft, tensors, adapter)
        if loaded.bank is not None and parts.bank is not None:
            loaded.bank.load_state_dict(parts.bank.state_dict())
        parts, peft_model = loaded, loaded_peft
        write_merged(out, config, parts, peft_model, args.overwrite, sections)
    else:
        write_adapter(out, config, parts, peft_model, args.overwrite, sections)
    print(f"{'merged checkpoint' if args.merge_lora else 'adapter folder'}: {out}")
    if destination is not None:
        retry = ["subtoken-train", "export", args.source, args.out, "--overwrite", "--push-to-hub", args.push_to_hub]
        for option in ("backbone", "metrics", "revision", "message"):
            retry += [f"--{option}", value] if (value := getattr(args, option)) else []
        flags = {"--merge-lora": args.merge_lora, "--private": args.private}
        publish(out, destination, [*retry, *(flag for flag, given in flags.items() if given)])
    return 0


def publish(folder: Path, destination: Destination, retry: list[str]) -> None:
    """Push a folder that is safely on disk, and say where it is; or how to try again."""
    from subtoken_train.artifact.hub import push_folder

    try:
        address = push_folder(folder, destination)
    except ValueError as error:
        again = f"Try again with: {shell_words(*retry)}"
        raise UncutError(f"{folder} is written, but not published: {error}. {again}") from error
    print(f"published: {address}")


_PNG, _MAX_PICTURE = b"\x89PNG\r\n\x1a\n", 2**20


@dataclass(frozen=True)
class Source:
    """An adapter folder or a checkpoint folder to export, and the recipe beside it where there is one."""

    folder: Path
    is_adapter: bool
    recipe: Path | None

    def picture(self) -> bytes | None:
        """Return the picture of the training that an adapter folder holds; None where it holds none of ours."""
        path = self.folder / PICTURE_FILE
        if not self.is_adapter or not path.is_file() or check_regular(path) > _MAX_PICTURE:
            return None
        content = path.read_bytes()
        return content if content.startswith(_PNG) else None


def find_source(path: Path) -> Source:
    """Find the adapter or checkpoint that a path means: a run's adapter first, then its newest complete checkpoint."""
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; name a run (runs/NAME), one of its checkpoints, or an adapter")
    for adapter in (path, path / "adapter"):
        if (adapter / CONFIG_FILE).is_file():
            return Source(adapter, True, _recipe_of(adapter))
    folder, checkpoint = path if path.name == "checkpoints" else path / "checkpoints", path
    if not path.name.startswith("step-"):
        if not folder.is_dir():
            raise ValueError(f"{path} is neither a run, a checkpoint of one, nor an adapter folder (no {CONFIG_FILE})")
        if (newest := newest_complete(folder)) is None:
            raise ValueError(f"{path} has neither an adapter nor a complete checkpoint; train it first")
        checkpoint = newest
    read_marker(checkpoint)
    if (recipe := _recipe_of(checkpoint.parent)) is None:
        words = "which says what its tensors belong to"
        raise ValueError(f"{checkpoint} has no {RECIPE_FILE} in {checkpoint.parent.parent}, {words}")
    return Source(checkpoint, False, recipe)


def _recipe_of(folder: Path) -> Path | None:
    return next((place / RECIPE_FILE for place in (folder, folder.parent) if (place / RECIPE_FILE).is_file()), None)


def _read_parts(source: Source, cli: Any, backbone: str | None) -> tuple[AdapterConfig, CompressedBackbone, PeftModel]:
    from subtoken_train.artifact.config import read_config
    from subtoken_train.artifact.folder import read_adapter
    from subtoken_train.training.module import adapter_config, lay_out_checkpoint

    if source.is_adapter:
        named = read_config(source.folder).backbone
        if backbone is not None:
            named = replace(named, path=backbone, revision=None)
        config, parts, peft_model = read_adapter(source.folder, named, layout=True)
        if peft_model is None:
            raise ValueError(f"{source.folder} is merged and has no LoRA; export the folder that it was merged from")
        identity = replace(config.identity, path=named.path, revision=named.revision)
        return replace(config, backbone=named, identity=identity), parts, peft_model
    module = cli.model
    if backbone is not None:
        module.backbone_config = replace(module.backbone_config, path=backbone, revision=None)
    lay_out_checkpoint(module, source.folder)
    assert source.recipe is not None
    steps, seed = read_marker(source.folder).step, cli.config.seed_everything
    config = adapter_config(module, module.family, {"name": source.recipe.parent.name, "steps": steps, "seed": seed})
    return config, module.parts, module.peft_model
