"""Models of the Hugging Face hub, by name: ``ORG/NAME[/FILE.gguf][@REVISION]``.

A name that exists as a path is used as a path and never looked up. Otherwise the revision (a
branch, a tag or a commit) is resolved to a commit once (`pinned`), so that all groups of a cluster
serve the same weights. Each node downloads the files of that commit into huggingface_hub's cache. A
commit that a node has in full is used without a request. huggingface_hub locks each file, so other
processes of the node wait for the first one to download it.

huggingface_hub reads HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE when it is imported. It is
imported only if a name is not a path. This module does not import torch.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from quire.worker.model.config import WEIGHT_SUFFIXES, read_model_spec
from quire.worker.model.sentence_settings import MODEL_SETTINGS, TRANSFORMER_SETTINGS
from quire.worker.request.errors import CheckpointError, ConfigError
from quire.worker.weights.adapter_texts import FILE_NAMES as TEXT_NAMES
from quire.worker.weights.gguf.container import SUFFIX, choose
from quire.worker.weights.modules_file import MODULES, module_folders, transformer_folder
from quire.worker.weights.stored import MODELOPT_NAME

_NAME = re.compile(
    r"(\w[\w.-]*/\w[\w.-]*)(?:/((?:\w[\w.+-]*/)*\w[\w.+-]*\.gguf))?(?:@(.+))?", re.ASCII
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r".*/models--([^/]+?)--([^/]+)/snapshots/[^/]+(?:/.*\.gguf)?")
"""The folder of a repository's commit in huggingface_hub's cache, or a GGUF file in it."""

_CONFIG = (
    *("config.json", "generation_config.json", MODELOPT_NAME),
    *(MODULES, MODEL_SETTINGS, *TRANSFORMER_SETTINGS),
)
_TEXT = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHTS = ("*.safetensors",)
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors", *TEXT_NAMES)
_HIDDEN = (".*", "consolidated*")
_IGNORED = ("*/*", *_HIDDEN)
"""Files not downloaded, such as weights in another format; each node makes its own digests. Folders
are those of sentence-transformers' modules alone."""


def is_hub_name(model: Path) -> bool:
    """Whether ``model`` is looked up on the hub: it is a valid name there and no existing path."""
    match = _NAME.fullmatch(str(model))
    is_name = match is not None and (bool(match[2]) or model.suffix not in WEIGHT_SUFFIXES)
    return is_name and not model.exists()


def model_name(model: Path) -> str:
    """The name that users see: ``ORG/NAME`` for a model of the hub or in its cache, else the name
    of the directory, or of the GGUF file without its suffix."""
    if is_hub_name(model):
        return _split(model)[0]
    # Only the folder is resolved: the file may be a link to the cache's blobs.
    path = model.parent.resolve() / model.name if model.suffix == SUFFIX else model.resolve()
    cached = _SNAPSHOT.fullmatch(path.as_posix())
    return f"{cached[1]}/{cached[2]}" if cached else path.name.removesuffix(SUFFIX)


def with_revision(model: Path, revision: str | None) -> Path:
    """``model`` at ``revision``, if one is given.

    Raises:
        ConfigError: ``model`` is not a name on the hub, or names another revision.
    """
    if revision is None:
        return model
    if not is_hub_name(model) or _split(model)[2] not in (None, revision):
        raise ConfigError(
            f"revision={revision!r}: the model is {str(model)!r}; only a model of the hub, "
            "ORG/NAME, has revisions"
        )
    return _joined(*_split(model)[:2], revision)


def pinned(model: Path) -> Path:
    """``ORG/NAME@COMMIT``, with the current commit of its revision; a path is returned unchanged.

    Raises:
        CheckpointError: The hub does not have the model, denies access, or cannot be reached.
    """
    if not is_hub_name(model):
        return model
    name, file, revision = _split(model)
    if revision is not None and _COMMIT.fullmatch(revision):
        return model
    from huggingface_hub import resolve_revision

    with _explained(model):
        return _joined(name, file, resolve_revision(name, revision=revision).resolved)


def fetch_text_files(model: Path) -> Path:
    """Downloads what a gateway needs: all files but the weights. Returns the directory, or for a
    GGUF model the whole file. A path is returned unchanged.

    Raises:
        CheckpointError: The hub does not have the model, denies access or cannot be reached, or
            Quire does not support the model.
    """
    return _fetch(model, _TEXT)


def fetch_checkpoint(model: Path) -> Path:
    """Downloads all files, the weights last. Returns and raises as `fetch_text_files`."""
    return _fetch(model, (*_TEXT, *_WEIGHTS))


def fetch_adapter(adapter: Path) -> Path:
    """Downloads an adapter's files; returns the directory. A path is returned unchanged.

    Raises:
        CheckpointError: The hub does not have the adapter, denies access or cannot be reached.
    """
    if not is_hub_name(adapter):
        return adapter
    adapter = pinned(adapter)
    with _explained(adapter):
        return _download(adapter, _ADAPTER)


def _fetch(model: Path, patterns: Sequence[str]) -> Path:
    if not is_hub_name(model):
        return model
    model = pinned(model)
    with _explained(model):
        folder = _download(model, _CONFIG)
        if (gguf := _gguf_file(model)) is not None:
            parts = re.sub(r"-00001-of-(\d{5}\.gguf)$", r"-?????-of-\1", gguf)
            return _download(model, [parts], ignored=()) / gguf
        modules = module_folders(folder)
        _download_modules(model, modules, _TEXT)
        if not (transformer_folder(folder) / "config.json").is_file():
            raise CheckpointError(
                f"{model}: the repository has no config.json and no GGUF file; only checkpoints in "
                "these formats are read, not adapters"
            )
        read_model_spec(folder)  # Fails before an hour of downloading weights.
        _download_modules(model, modules, patterns)
        return _download(model, patterns)


def _download_modules(model: Path, folders: Sequence[str], patterns: Sequence[str]) -> None:
    """Downloads the files of sentence-transformers' modules."""
    if folders:
        wanted = [f"{folder}/{pattern}" for folder in folders for pattern in patterns]
        _download(model, wanted, ignored=_HIDDEN)


def _gguf_file(model: Path) -> str | None:
    """The GGUF file that is named, or the only one of a repository without safetensors files."""
    from huggingface_hub import get_cached_repo_tree

    name, file, commit = _split(model)
    names = {each.path for each in get_cached_repo_tree(name, revision=commit)}
    found = sorted(each for each in names if each.endswith(SUFFIX))
    if file is not None and file not in names:
        raise CheckpointError(
            f"{model}: the repository has no file {file!r}; its GGUF files: "
            f"{', '.join(found) or 'none'}"
        )
    if file is not None or any(each.endswith(".safetensors") for each in names):
        return file
    chosen = choose(Path(name), found)
    return None if chosen is None else chosen.relative_to(name).as_posix()


def _download(model: Path, patterns: Sequence[str], *, ignored: Sequence[str] = _IGNORED) -> Path:
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

    name, _, commit = _split(model)

    def snapshot(*, local_files_only: bool) -> Path:
        return Path(
            snapshot_download(
                name,
                revision=commit,
                allow_patterns=list(patterns),
                ignore_patterns=list(ignored),
                local_files_only=local_files_only,
            )
        )

    with contextlib.suppress(CachedRepoTreeNotFoundError, LocalEntryNotFoundError):
        # Without the commit's list of files, it is unknown whether the cache has all of them.
        get_cached_repo_tree(name, revision=commit)
        return snapshot(local_files_only=True)
    return snapshot(local_files_only=False)


def _split(model: Path) -> tuple[str, str | None, str | None]:
    """Splits a name into repository, file and revision."""
    match = _NAME.fullmatch(str(model))
    assert match is not None, "is_hub_name"
    return match[1], match[2], match[3]


def _joined(name: str, file: str | None, revision: str) -> Path:
    """The inverse of `_split`."""
    return Path(f"{name}/{file}@{revision}" if file else f"{name}@{revision}")


@contextlib.contextmanager
def _explained(model: Path) -> Iterator[None]:
    """Turns errors of huggingface_hub into a CheckpointError that says what to do."""
    try:
        yield
    except CheckpointError:
        raise
    # Its own dependencies raise other errors, and hf_xet raises RuntimeError.
    except Exception as error:
        raise CheckpointError(f"{model}: {_what_to_do(model, error)}") from error


def _what_to_do(model: Path, error: Exception) -> str:
    from huggingface_hub import constants, errors, get_token, is_offline_mode

    name, _, revision = _split(model)
    hub = constants.ENDPOINT
    with_token = "with the token that is set" if get_token() else "without a token"
    match error:
        case errors.GatedRepoError():
            return (
                f"its repository is gated, and cannot be read {with_token}; accept its terms at "
                f"{hub}/{name} and set HF_TOKEN to a token of that account"
            )
        case errors.RevisionNotFoundError():
            return (
                f"the repository has no revision {revision!r}; give a branch, a tag or a commit of "
                f"{hub}/{name}"
            )
        # Without a token, the hub answers 401 for a repository that it does not show.
        case errors.HfHubHTTPError() if error.response.status_code in (401, 404):
            return (
                f"neither a path here nor a repository that {hub} shows {with_token}; check "
                "the name, and for a private repository set HF_TOKEN to a token that may read it"
            )
        case errors.HfHubHTTPError() if error.response.status_code == 403:
            return f"{hub} does not give it {with_token}: {_first_line(error)}; check HF_TOKEN"
        case errors.LocalEntryNotFoundError() | errors.RevisionResolutionError():
            if is_offline_mode():
                return (
                    f"HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} has no whole copy of it; "
                    "fetch it once without HF_HUB_OFFLINE, or set HF_HOME to where it is"
                )
            return (
                f"neither a path here, nor is there a whole copy in {constants.HF_HUB_CACHE}, and "
                f"{hub} cannot be reached ({_first_line(error.__cause__ or error)}); check the "
                "network, or name a mirror by HF_ENDPOINT"
            )
        case _ if any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT)):
            return (
                f"no space is left for it in {constants.HF_HUB_CACHE}; make room there, or set "
                "HF_HOME to a larger disk; files that are whole are kept"
            )
        case OSError() if error.filename is not None:
            return f"{error.filename}: {error.strerror}; HF_HOME says where models are kept"
    return f"cannot be fetched from {hub}: {type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
