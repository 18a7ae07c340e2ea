"""The harness itself: what it reads, and that a block that is wrong fails."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path

import pytest
import runner
from blocks import Block, files, parse, parts, read, runnable, unused

PAGE = """
Text.

<!-- block: needs=gpu expect="two words" -->

```python title="x"
a = 1
```

1. a list

   ```python
   # pair.py: a file
   if a:
       b = 2
   ```

```text
not run
```
"""


def blocks(text: str, path: Path) -> list[Block]:
    page = path / "page.md"
    page.write_text(textwrap.dedent(text))
    return read(page, path)


def sh(text: str, **marks: list[str]) -> Block:
    return Block("page", 1, "sh", textwrap.dedent(text), marks)


def test_parse() -> None:
    first, second, third = parse(PAGE, "page")
    assert (first.name, first.language, first.text) == ("page:6", "python", "a = 1\n")
    assert first.marks == {"needs": ["gpu"], "expect": ["two words"]}
    assert (second.file, second.marks) == ("pair.py", {})
    assert second.text == "# pair.py: a file\nif a:\n    b = 2\n"
    assert third.language == "text"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```bash\n```", "page:1: write ```sh, not ```bash"),
        ("```sh\n", "page:1: this fence has no end"),
        ("<!-- block: ship=x -->\n```sh\n```", "page:1: mark 'ship' is not one of skip, "),
        ("<!-- block: skip -->\n```sh\n```", "page:1: mark 'skip' takes a value"),
        ("<!-- block: continues=1 -->\n```sh\n```", "page:1: mark 'continues' takes no value"),
        ("<!-- block: continues -->\n\nText.", "page:1: no fenced block follows this mark"),
        ("<!-- block: continues -->", "page:1: no fenced block follows this mark"),
    ],
)
def test_wrong_pages(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        list(parse(text, "page"))


def test_continues_and_files(tmp_path: Path) -> None:
    page = """
        ```python
        a = 1
        ```
        ```python
        # mine.py
        ```
        <!-- block: continues -->
        ```python
        b = a
        ```
        ```sh
        python mine.py
        ```
    """
    found = blocks(page, tmp_path)
    assert [b.text for b in runnable(found)] == ["a = 1\n", "a = 1\nb = a\n", "python mine.py\n"]
    assert files(found, found[0]) == {}
    assert files(found, found[-1]) == {"mine.py": "# mine.py\n"}
    assert unused(found) == []
    assert unused(found[:-1]) == ["page.md:5"]


def test_parts() -> None:
    before, found = parts("a\n# terminal 1\nb\n# host 10.0.0.2, with Ctrl-C\nc\nd\n")
    assert before == "a\n"
    assert [(p.host, p.text, p.interrupted) for p in found] == [
        ("", "b\n", False),
        ("10.0.0.2", "c\nd\n", True),
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("false\ntrue\n", "exit status 1"),
        ("# terminal 1\nsleep 50\n# terminal 2\nexit 3\n", "# terminal 2: exit status 3"),
        ("# terminal 1 (Ctrl-C)\ntrue\n# terminal 2\ntrue\n", "terminal 1 .*printed nothing"),
        ("echo one; python -c 'raise SystemExit(4)'", r"exit status 4\n\n    one"),
    ],
)
def test_wrong_blocks(text: str, why: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(runner.Failed, match=why):
        runner.run(sh(text), {}, tmp_path)
    assert time.monotonic() - began < 30


def test_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LIMIT", 0.3)
    with pytest.raises(runner.Failed, match="did not end within"):
        runner.run(sh("sleep 50"), {}, tmp_path)


def test_expect_and_status(tmp_path: Path) -> None:
    runner.run(sh("echo good; exit 3", expect=["good"], status=["3"]), {}, tmp_path)
    with pytest.raises(runner.Failed, match="the output has no 'bad'"):
        runner.run(sh("echo good", expect=["bad"]), {}, tmp_path)


def test_terminals_share_a_folder(tmp_path: Path) -> None:
    text = """
        echo before >file
        # terminal 1: end it with Ctrl-C
        cat file; sleep 50
        # terminal 2
        echo two
        # terminal 3
        cat three.txt
    """
    output = runner.run(sh(text), {"three.txt": "three\n"}, tmp_path)
    assert sorted(output.split()) == ["before", "three", "two"]


def test_terminals_share_a_network(tmp_path: Path) -> None:
    listen = (
        "import socket; s = socket.create_server(('127.0.0.1', 7003)); print('there'); s.accept()"
    )
    text = f"""
        # terminal 1 (Ctrl-C)
        python -c "{listen}"
        # terminal 2
        python -c "import socket; socket.create_connection(('127.0.0.1', 7003), 5)"
    """
    runner.run(sh(text), {}, tmp_path)


@pytest.mark.skipif(not runner.can_unshare(), reason="this process may not make namespaces")
def test_hosts(tmp_path: Path) -> None:
    connect = "python -c \"import socket; socket.create_connection(('10.9.0.1', 7000), 5)\""
    listen = (
        "import socket; s = socket.create_server(('10.9.0.1', 7000)); print('there'); s.accept()"
    )
    text = f"""
        # host 10.9.0.1 (Ctrl-C)
        python -c "{listen}"
        # host 10.9.0.2
        ip -br address; {connect}
    """
    output = runner.run(sh(text), {}, tmp_path)
    assert "10.9.0.2/24" in output and "10.9.0.1/24" not in output


@pytest.mark.parametrize(
    ("marks", "why"),
    [
        ({"skip": ["for a reason"]}, "for a reason"),
        ({"needs": ["no_such_module"]}, "needs the Python module no_such_module"),
        ({"needs": ["pytest"]}, ""),
    ],
)
def test_missing(marks: dict[str, list[str]], why: str) -> None:
    assert runner.missing(sh("true", **marks)) == why
