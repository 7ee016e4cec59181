"""How long a tenant waits for its answers beside another tenant's attacks on a gateway.

    python -m bench.attacks [--seconds 15] [--only uploads tokenize]

``quire serve`` with the demo model, one group and a key for each of three tenants. The victim sends
ordinary requests one after the other: four tokens after a short prompt, and after one of 100 KB,
which is cut. Shown are its longest and p99 wait for both kinds, alone and beside each attack:

    burn         control: the attackers only use CPU
    uploads      four bodies of 8 MiB, of which a byte comes each second
    connections  5,000 such bodies of small size from one address: all of the gateway's places
    tokenize     4 MB of spaces, or of one letter, to /tokenize
    detokenize   a million token ids to /detokenize
    chats        4,000 messages to be rendered by the chat template
    bodies       8 MB of JSON in short lists
    regex        regular expressions with nested counts, each new
    grammar      ambiguous grammars, each new (as in `bench.hostile`)
    schema       JSON schemas with thousands of properties, each new
    adapters     an operator's adapters: alternations for a rank pattern, a config of 200 MB, a FIFO

Four threads of one process attack, at niceness 10 if they compute.
"""

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from bench.hostile import ambiguous
from bench.report import command, markdown, percentile
from bench.servers import serving

NUM_THREADS = 4
_LARGE = "word " * 20_000
_FLAGS = ("--num-gateways", "1", "--num-groups", "1", "--enable-lora")

Attack = Callable[[str, int], None]
"""Attacks the server at a URL without end; the second argument is the thread's number."""


def main() -> None:
    parser = command("bench.attacks", __doc__)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.yaml"
        keys.write_text(_keys_file())
        os.environ["QUIRE_ADAPTER_DIR"] = f"{folder}/adapters"
        with serving(*_FLAGS, "--api-keys-file", str(keys)) as addresses:
            measure(addresses.http, arguments)


def measure(url: str, arguments: argparse.Namespace) -> None:
    rows = [["alone", *asyncio.run(_victim(url, arguments.seconds))]]
    print(rows[0], flush=True)
    for name in arguments.only:
        with _attacked(name, url):
            rows.append([name, *asyncio.run(_victim(url, arguments.seconds))])
        print(rows[-1], flush=True)
        time.sleep(2)  # Until the attackers' last work has ended.
    head = ["attack", "small: answers", "p99 s", "longest s", "large: answers", "p99 s"]
    print(markdown([*head, "longest s", "errors"], rows))


async def _victim(url: str, seconds: float) -> list[str]:
    """The cells of a row: for each kind of request how many were answered, p99 and longest wait."""
    errors = Counter[str]()
    timeout = httpx.Timeout(120)
    async with httpx.AsyncClient(base_url=url, headers=_key("victim"), timeout=timeout) as client:
        small = {"prompt": "ordinary", "max_tokens": 4}
        large = {"prompt": _LARGE, "max_tokens": 4, "truncate_prompt_tokens": 16}
        found = await asyncio.gather(
            *(_ask(client, body, seconds, errors) for body in (small, large))
        )
    cells = []
    for waits_s in found:
        cells += [str(len(waits_s)), f"{percentile(waits_s, 99):.2f}", f"{max(waits_s):.2f}"]
    return [*cells, str(dict(errors))]


async def _ask(
    client: httpx.AsyncClient, body: dict[str, object], seconds: float, errors: Counter[str]
) -> list[float]:
    """The seconds until each answer, an error's too."""
    waits_s, end_s = list[float](), time.monotonic() + seconds
    while (sent_s := time.monotonic()) < end_s:
        try:
            answer = await client.post("/v1/completions", json=body)
            if answer.is_error:
                errors[f"{answer.status_code} {answer.text[:60]}"] += 1
        except httpx.HTTPError as error:
            errors[type(error).__name__] += 1
        waits_s.append(time.monotonic() - sent_s)
        await asyncio.sleep(0.1)
    return waits_s


@contextlib.contextmanager
def _attacked(name: str, url: str) -> Iterator[None]:
    process = multiprocessing.get_context("spawn").Process(
        target=_attack, args=(name, url), daemon=True
    )
    process.start()
    time.sleep(1)
    try:
        yield
    finally:
        process.kill()
        process.join()


def _attack(name: str, url: str) -> None:
    os.nice(10)
    with contextlib.suppress(ValueError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threads = [
        threading.Thread(target=_without_end, args=(ATTACKS[name], url, number), daemon=True)
        for number in range(NUM_THREADS)
    ]
    for thread in threads:
        thread.start()
    threads[0].join()


def _without_end(attack: Attack, url: str, number: int) -> None:
    while True:
        with contextlib.suppress(OSError, httpx.HTTPError):
            attack(url, number)
        time.sleep(0.01)


# Attacks


def _burn(url: str, number: int) -> None:
    while True:
        pass


def _uploads(url: str, number: int, *, num: int = 1, num_bytes: int = 8 * 2**20) -> None:
    """Opens ``num`` uploads of ``num_bytes`` and sends a byte of each per second."""
    address = urlsplit(url)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json"
        f"\r\nAuthorization: Bearer {_name('attacker')}\r\nContent-Length: {num_bytes}\r\n\r\n"
    )
    first = head.encode() + b" " * min(num_bytes // 2, 100_000)
    with contextlib.ExitStack() as stack:
        uploads = []
        for _ in range(num):
            where = (str(address.hostname), address.port or 80)
            upload = socket.create_connection(where, source_address=("127.0.0.2", 0))
            uploads.append(stack.enter_context(upload))
            upload.sendall(first)
        while True:
            for upload in list(uploads):
                try:
                    upload.sendall(b" ")
                except OSError:
                    uploads.remove(upload)
            if not uploads:
                return
            time.sleep(1)


def _connections(url: str, number: int) -> None:
    _uploads(url, number, num=1250, num_bytes=1000)


def _posts(path: str, body: Callable[[int], object], *, tenant: str = "attacker") -> Attack:
    """An attack of one request after the other. ``body`` gets a number that no other request of
    this thread had."""

    def attack(url: str, number: int) -> None:
        with httpx.Client(base_url=url, headers=_key(tenant), timeout=300) as client:
            for turn in itertools.count(number, NUM_THREADS):
                client.post(path, json=body(turn))

    return attack


def _completion(**more: object) -> dict[str, object]:
    return {"prompt": [5, 6, 7], "max_tokens": 50, "temperature": 1.0, **more}


def _regex(turn: int) -> object:
    counted = f"((a|b|c{turn}|[d-z]{{1,{50 + turn % 50}}}){{1,99}}x?){{1,99}}"
    return _completion(structured_outputs={"regex": counted})


def _grammar(turn: int) -> object:
    grammar = ambiguous(f"r{os.getpid()}_{turn}_")
    return _completion(structured_outputs={"grammar": grammar}, n=16)


def _schema(turn: int) -> object:
    fields = {f"{turn} {name}": {"type": "string", "maxLength": name} for name in range(2000)}
    return _completion(structured_outputs={"json": {"type": "object", "properties": fields}})


def _adapters(url: str, number: int) -> None:
    """Loads bad adapters, each thread one kind."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}
        file = folder / "adapter_config.json"
        (folder / "adapter_model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
        if number == 0:
            os.mkfifo(file)
        elif number == 1:
            file.write_text(json.dumps(config | {"x": "y" * 200_000_000}))
        else:
            pattern = "(.|.)" * (18 + number) + "!"
            file.write_text(json.dumps(config | {"rank_pattern": {pattern: 8}}))
        body = {"lora_name": f"bad{number}", "lora_path": str(folder)}
        with httpx.Client(base_url=url, headers=_key("operator"), timeout=300) as client:
            while True:
                client.post("/v1/load_lora_adapter", json=body)


ATTACKS: dict[str, Attack] = {
    "burn": _burn,
    "uploads": _uploads,
    "connections": _connections,
    "tokenize": _posts("/tokenize", lambda turn: {"prompt": " a"[turn % 2] * 4_000_000}),
    "detokenize": _posts("/detokenize", lambda turn: {"tokens": [5 + turn % 100] * 1_000_000}),
    "chats": _posts(
        "/v1/chat/completions",
        lambda turn: {
            "messages": [
                {"role": "user", "content": f"{turn} words"},
                {"role": "assistant", "content": "more"},
            ]
            * 2000,
            "max_tokens": 1,
        },
    ),
    "bodies": _posts("/v1/completions", lambda turn: {"prompt": [[turn % 100]] * 49_000}),
    "regex": _posts("/v1/completions", _regex),
    "grammar": _posts("/v1/completions", _grammar),
    "schema": _posts("/v1/completions", _schema),
    "adapters": _adapters,
}


# Keys


def _name(tenant: str) -> str:
    return f"key-of-{tenant}"


def _key(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {_name(tenant)}"}


def _keys_file() -> str:
    tenants = ("victim", "attacker", "operator")
    lines = ["tenants:", *(f"  {each}: {{operator: {_is(each)}}}" for each in tenants), "keys:"]
    for each in tenants:
        digest = hashlib.sha256(_name(each).encode()).hexdigest()
        lines.append(f'- {{name: {each}, tenant: {each}, hash: "sha256:{digest}"}}')
    return "\n".join(lines)


def _is(tenant: str) -> str:
    return str(tenant == "operator").lower()


if __name__ == "__main__":
    main()
