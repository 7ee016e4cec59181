"""Models of the hub, fetched from a server on the loopback. Each fetch runs in a separate process,
because the hub's library reads the environment on import."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.hub_server import TOKEN, Hub, Repository, files_of, hub_server
from tests.worker.model.test_sentence_folder import DENSE, save

from quire.worker.model.hub import (
    fetch_checkpoint,
    fetch_text_files,
    is_hub_name,
    model_name,
    with_revision,
)
from quire.worker.request.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.slow

# Prints the function's result for each model: a path, or the error's type and message.
_ASK = """
import json, sys
from pathlib import Path
from quire.worker.model import hub
from quire.worker.request.errors import QuireError
for model in sys.argv[2:]:
    try:
        print(json.dumps(["", str(getattr(hub, sys.argv[1])(Path(model)))]))
    except QuireError as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


@pytest.fixture
def hub(tiny_llama: Path) -> Iterator[Hub]:
    """A hub with the repository ``org/tiny``, a Llama, on branch main."""
    with hub_server() as hub:
        hub.repositories["org/tiny"] = Repository()
        hub.repositories["org/tiny"].commit(files_of(tiny_llama))
        yield hub


def ask(function: str, *models: str, environment: dict[str, str], cwd: Path) -> list[list[str]]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _ASK, function, *models],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def fetch(hub: Hub, tmp_path: Path) -> Callable[..., Path]:
    """``fetch(model, function=..., home=..., **environment)`` → the model's directory."""

    def fetch(
        model: str, function: str = "fetch_checkpoint", home: str = "home", **environment: str
    ) -> Path:
        (answer,) = ask(
            function,
            model,
            environment=hub.environment(tmp_path / home, **environment),
            cwd=tmp_path,
        )
        assert not answer[0], answer
        return Path(answer[1])

    return fetch


@pytest.fixture
def refusal(hub: Hub, tmp_path: Path) -> Callable[..., str]:
    """``refusal(model, **environment)`` → the message of the CheckpointError."""

    def refusal(model: str, home: str = "home", **environment: str) -> str:
        variables = hub.environment(tmp_path / home, **environment)
        (answer,) = ask("fetch_checkpoint", model, environment=variables, cwd=tmp_path)
        assert answer[0] == "CheckpointError", answer
        return answer[1]

    return refusal


def test_a_model_of_the_hub_gives_the_tokens_of_its_directory(
    hub: Hub, tiny_llama: Path, tmp_path: Path
) -> None:
    script = (
        "import json, sys\n"
        "from quire.llm import LLM, SamplingParams\n"
        "for model in sys.argv[1:]:\n"
        "    with LLM(model=model, kv_cache_memory_bytes=2**20, num_threads=1) as llm:\n"
        "        prompts = [{'prompt_token_ids': [7, 8, 9]}, {'prompt_token_ids': [40]}]\n"
        "        greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)\n"
        "        done = llm.generate(prompts, greedy, use_tqdm=False)\n"
        "        print(json.dumps([list(each.outputs[0].token_ids) for each in done]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "org/tiny", str(tiny_llama)],
        env=hub.environment(tmp_path / "home"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    from_hub, from_directory = done.stdout.splitlines()
    assert from_hub == from_directory
    assert [len(tokens) for tokens in json.loads(from_hub)] == [16, 16]


def test_only_what_is_needed_is_fetched_and_the_configuration_first(
    hub: Hub, tiny_llama: Path, fetch: Callable[..., Path]
) -> None:
    needless = [
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/model.safetensors",
        ".a.json",
    ]
    needed = {"chat_template.jinja": b"{{ '' }}", "tokenizer.model": b"x", "merges.txt": b"y"}
    hub.repositories["org/tiny"].commit(
        files_of(tiny_llama) | needed | dict.fromkeys([*needless, "README.md"], b"z")
    )
    text = fetch("org/tiny", function="fetch_text_files")
    assert set(files_of(text)) == {"config.json", "generation_config.json", *needed}

    folder = fetch("org/tiny")
    assert files_of(folder) == files_of(tiny_llama) | needed
    assert set(hub.sent()[:2]) == {"config.json", "generation_config.json"}
    assert hub.sent()[-1] == "model.safetensors"


def test_a_sentence_transformers_model_is_fetched_with_its_modules(
    hub: Hub, fetch: Callable[..., Path], tmp_path: Path
) -> None:
    save(tmp_path, "Pooling", "Dense", first="0_Transformer", Dense=DENSE)
    files = {
        file.relative_to(tmp_path).as_posix(): file.read_bytes()
        for file in tmp_path.rglob("*.json")
    }
    weights = {f"{each}/model.safetensors": b"w" for each in ("0_Transformer", "2_Dense")}
    hub.repositories["org/st"] = Repository()
    hub.repositories["org/st"].commit(files | weights | {"onnx/config.json": b"{}"})
    text = fetch("org/st", function="fetch_text_files")
    assert _all_files(text) == files
    assert _all_files(fetch("org/st")) == files | weights


def _all_files(folder: Path) -> dict[str, bytes]:
    found = (each for each in folder.rglob("*") if each.is_file())
    return {each.relative_to(folder).as_posix(): each.read_bytes() for each in found}


def test_a_model_of_an_unsupported_kind_is_refused_before_its_weights_are_fetched(
    hub: Hub, refusal: Callable[..., str]
) -> None:
    config = json.dumps({"architectures": ["BloomForCausalLM"], "model_type": "bloom"}).encode()
    files = {"config.json": config, "model.safetensors": b"weights", "tokenizer.json": b"{}"}
    hub.repositories["org/bloom"] = Repository()
    hub.repositories["org/bloom"].commit(files)
    assert "BloomForCausalLM has alibi" in refusal("org/bloom")
    assert hub.sent() == ["config.json"]


def test_a_repository_of_gguf_files_gives_the_one_that_is_meant(
    hub: Hub, fetch: Callable[..., Path], refusal: Callable[..., str]
) -> None:
    repository = hub.repositories["org/tiny-GGUF"] = Repository()
    one = {"tiny.Q8_0.gguf": b"eight", "README.md": b"", "config.json": b"{}"}
    repository.commit({**one, "mmproj-tiny.gguf": b"images"})
    file = fetch("org/tiny-GGUF")
    assert (file.name, file.read_bytes()) == ("tiny.Q8_0.gguf", b"eight")
    assert model_name(file) == "org/tiny-GGUF"
    assert fetch("org/tiny-GGUF", function="fetch_text_files") == file

    parts = {f"Q4/tiny-0000{n}-of-00002.gguf": b"%d" % n for n in (1, 2)}
    repository.commit({**one, **parts})
    first = "org/tiny-GGUF/Q4/tiny-00001-of-00002.gguf"
    assert refusal("org/tiny-GGUF").endswith(
        f"has 2 GGUF files, Q4/tiny-00001-of-00002.gguf, tiny.Q8_0.gguf: name one, such as {first}"
    )
    file = fetch(first, home="other")
    assert sorted(files_of(file.parent)) == sorted(map(os.path.basename, parts))
    assert model_name(file) == "org/tiny-GGUF"
    assert "has no file 'x.gguf'; its GGUF files: Q4/tiny-00001-of-00002.gguf, Q4/tiny-00002" in (
        refusal("org/tiny-GGUF/x.gguf")
    )
    assert "its GGUF files: none" in refusal("org/tiny/x.gguf")


def test_a_repository_without_a_configuration_is_refused(
    hub: Hub, refusal: Callable[..., str]
) -> None:
    hub.repositories["org/tiny-lora"] = Repository()
    hub.repositories["org/tiny-lora"].commit({"adapter.bin": b"weights", "README.md": b""})
    assert "has no config.json and no GGUF file; only checkpoints" in refusal("org/tiny-lora")
    assert not hub.sent()


def test_nodes_fetch_the_commit_that_was_pinned_though_the_branch_has_moved(
    hub: Hub, tiny_llama: Path, fetch: Callable[..., Path]
) -> None:
    repository = hub.repositories["org/tiny"]
    first = repository.branches["main"]
    pinned = str(fetch("org/tiny", function="pinned"))
    assert pinned == f"org/tiny@{first}"
    one = fetch(pinned, home="one")

    moved = repository.commit(files_of(tiny_llama) | {"merges.txt": b"moved"})
    other = fetch(pinned, home="other")
    assert one.name == other.name == first
    assert files_of(one) == files_of(other) == files_of(tiny_llama)
    assert fetch("org/tiny", home="other").name == moved
    assert model_name(other) == "org/tiny"


def test_a_revision_is_a_branch_a_tag_or_a_commit(
    hub: Hub, tiny_llama: Path, fetch: Callable[..., Path]
) -> None:
    repository = hub.repositories["org/tiny"]
    first = repository.branches["main"]
    other = repository.commit(files_of(tiny_llama) | {"a.txt": b""}, branch="v2")
    assert fetch("org/tiny@v2").name == other
    assert fetch(f"org/tiny@{first}").name == first


def test_processes_of_one_node_fetch_each_file_once(
    hub: Hub, tmp_path: Path, fetch: Callable[..., Path]
) -> None:
    pinned = str(fetch("org/tiny", function="pinned"))
    may_end = threading.Event()
    hub.amid_weights = may_end.wait
    with ThreadPoolExecutor(3) as pool:
        folders = [pool.submit(fetch, pinned) for _ in range(3)]
        # All three request the weights; two find the file locked and wait.
        while sum(each.endswith("model.safetensors") for each in hub.requests) < 4:
            time.sleep(0.01)
            assert not any(folder.done() for folder in folders)
        may_end.set()
        assert len({folder.result() for folder in folders}) == 1
    assert hub.sent(".safetensors") == ["model.safetensors"]


def test_a_commit_that_is_here_needs_no_hub(hub: Hub, fetch: Callable[..., Path]) -> None:
    pinned = str(fetch("org/tiny", function="pinned"))
    folder = fetch(pinned)
    hub.requests.clear()
    assert fetch(pinned) == folder
    assert not hub.requests
    assert fetch("org/tiny", HF_HUB_OFFLINE="1") == folder
    assert fetch("org/tiny", HF_ENDPOINT="http://127.0.0.1:9") == folder
    assert not hub.requests


def test_a_download_that_was_cut_off_is_completed(
    hub: Hub, tiny_llama: Path, fetch: Callable[..., Path], refusal: Callable[..., str]
) -> None:
    fetch("org/tiny", function="fetch_text_files")
    assert "no whole copy" in refusal("org/tiny", HF_HUB_OFFLINE="1")
    assert files_of(fetch("org/tiny")) == files_of(tiny_llama)


def test_what_the_hub_refuses_says_what_to_do(hub: Hub, refusal: Callable[..., str]) -> None:
    assert refusal("org/tyni").startswith(
        f"org/tyni: neither a path here nor a repository that {hub.url} shows without a token; "
        "check the name, and for a private repository set HF_TOKEN"
    )
    assert "shows with the token that is set" in refusal("org/tyni", HF_TOKEN=TOKEN)
    for revision in ("v9", "f" * 40):
        said = refusal(f"org/tiny@{revision}")
        assert f"no revision '{revision}'; give a branch, a tag or a commit" in said


def test_a_gated_model_needs_the_token_of_an_account_that_was_let_in(
    hub: Hub, tiny_llama: Path, fetch: Callable[..., Path], refusal: Callable[..., str]
) -> None:
    hub.repositories["org/tiny"].is_gated = True
    what_to_do = f"accept its terms at {hub.url}/org/tiny and set HF_TOKEN"
    said = refusal("org/tiny")
    assert "gated, and cannot be read without a token" in said
    assert what_to_do in said
    said = refusal("org/tiny", HF_TOKEN="hf_wrong")
    assert "gated, and cannot be read with the token that is set" in said
    assert what_to_do in said
    assert files_of(fetch("org/tiny", HF_TOKEN=TOKEN)) == files_of(tiny_llama)


def test_without_the_hub_or_a_copy_it_says_which_of_them_to_get(
    refusal: Callable[..., str], tmp_path: Path
) -> None:
    said = refusal("org/tiny", HF_HUB_OFFLINE="1")
    assert f"HF_HUB_OFFLINE is set, and {tmp_path}/home/hub has no whole copy of it" in said
    assert "fetch it once without HF_HUB_OFFLINE" in said
    said = refusal("org/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be reached (" in said
    assert "check the network" in said


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"no space is left for it in .* set HF_HOME to a la"):
        fetch_checkpoint(Path(f"org/tiny@{'a' * 40}"))


def test_an_existing_path_is_never_looked_up(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("org").mkdir()
    Path("org/tiny").symlink_to(tiny_llama)
    assert fetch_checkpoint(Path("org/tiny")) == fetch_text_files(Path("org/tiny"))
    assert not is_hub_name(Path("org/tiny"))
    assert is_hub_name(Path("org/tiny@main"))
    for path in ("/org/tiny", "../org/tiny", "~/tiny", "tiny", "a/b/c", "org/weights.gguf"):
        assert not is_hub_name(Path(path)), path


def test_a_revision_is_for_models_of_the_hub(tiny_llama: Path) -> None:
    assert with_revision(Path("org/tiny"), "refs/pr/1") == Path("org/tiny@refs/pr/1")
    assert with_revision(tiny_llama, None) == tiny_llama
    for model in (tiny_llama, Path("org/tiny@v1")):
        with pytest.raises(ConfigError, match="revision='v2': the model is "):
            with_revision(model, "v2")
