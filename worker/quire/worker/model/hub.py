"""Models of the Hugging Face hub, by name: ``ORG/NAME[/FILE.gguf][@REVISION]``.

What exists as a path is that path and is never looked up. Else the revision, a branch, a tag or a
commit, is resolved to a commit once (`pinned`), so that all groups of a cluster serve the same
weights, and each node fetches the files of that commit into huggingface_hub's cache. A commit that
a node has whole is used without a request. Processes of one node that want the same file wait for
the first of them to fetch it: huggingface_hub locks each file.

huggingface_hub reads HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE when it is imported, which
is only done where a name is no path. Knows no torch.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from quire.worker.api.errors import CheckpointError, ConfigError
from quire.worker.model.config import WEIGHT_SUFFIXES, read_model_spec
from quire.worker.model.gguf.container import SUFFIX, choose
from quire.worker.model.stored_weights import MODELOPT_NAME

_NAME = re.compile(
    r"(\w[\w.-]*/\w[\w.-]*)(?:/((?:\w[\w.+-]*/)*\w[\w.+-]*\.gguf))?(?:@(.+))?", re.ASCII
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r".*/models--([^/]+?)--([^/]+)/snapshots/[^/]+(?:/.*\.gguf)?")
"""The folder of a repository's commit in huggingface_hub's cache, or a GGUF file in it."""

_CONFIG = ("config.json", "generation_config.json", MODELOPT_NAME)
_TEXT = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHTS = ("*.safetensors",)
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_IGNORED = ("*/*", ".*", "consolidated*")
"""Such as the same weights in another format; digests of weights are this node's own."""


def is_hub_name(model: Path) -> bool:
    """Whether ``model`` is to be looked up on the hub: no such path exists, and it can be a name
    there."""
    match = _NAME.fullmatch(str(model))
    is_name = match is not None and (bool(match[2]) or model.suffix not in WEIGHT_SUFFIXES)
    return is_name and not model.exists()


def model_name(model: Path) -> str:
    """What users call it: ``ORG/NAME`` on the hub and in its cache, else the directory's name, or a
    GGUF file's without its suffix."""
    if is_hub_name(model):
        return _split(model)[0]
    # The file itself may be a link into the cache's folder of all contents.
    path = model.parent.resolve() / model.name if model.suffix == SUFFIX else model.resolve()
    cached = _SNAPSHOT.fullmatch(path.as_posix())
    return f"{cached[1]}/{cached[2]}" if cached else path.name.removesuffix(SUFFIX)


def with_revision(model: Path, revision: str | None) -> Path:
    """``model`` at ``revision``, where there is one.

    Raises:
        ConfigError: It is no name on the hub, or has another revision.
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
    """``ORG/NAME@COMMIT``, of what its revision is now; a path as it is.

    Raises:
        CheckpointError: The hub does not have or give it, or cannot be asked.
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
    """A directory with all but the weights: what a gateway needs. Or the GGUF file, in which they
    are. A path as it is.

    Raises:
        CheckpointError: The hub does not have or give it, cannot be asked, or the model is of a
            kind that Quire does not run.
    """
    return _fetch(model, _TEXT)


def fetch_checkpoint(model: Path) -> Path:
    """The same with the weights, which are fetched last."""
    return _fetch(model, (*_TEXT, *_WEIGHTS))


def fetch_adapter(adapter: Path) -> Path:
    """A directory with an adapter's files. A path as it is.

    Raises:
        CheckpointError: The hub does not have or give it, or cannot be asked.
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
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"{model}: the repository has no config.json and no GGUF file; only checkpoints in "
                "these formats are read, not adapters"
            )
        read_model_spec(folder)  # An hour before its weights would be there.
        return _download(model, patterns)


def _gguf_file(model: Path) -> str | None:
    """The file that is named, or the only one of a repository without safetensors files."""
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
        # Without the list of the commit's files nobody knows whether all of them are here.
        get_cached_repo_tree(name, revision=commit)
        return snapshot(local_files_only=True)
    return snapshot(local_files_only=False)


def _split(model: Path) -> tuple[str, str | None, str | None]:
    """Its repository, the file in it and its revision."""
    match = _NAME.fullmatch(str(model))
    assert match is not None, "is_hub_name"
    return match[1], match[2], match[3]


def _joined(name: str, file: str | None, revision: str) -> Path:
    """What `_split` splits."""
    return Path(f"{name}/{file}@{revision}" if file else f"{name}@{revision}")


@contextlib.contextmanager
def _explained(model: Path) -> Iterator[None]:
    """Turns what huggingface_hub raises into a CheckpointError that says what to do."""
    try:
        yield
    except CheckpointError:
        raise
    # The libraries below it raise errors of their own, and hf_xet RuntimeError.
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
        # Those that it does not show are answered with 401 where no token is sent.
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
