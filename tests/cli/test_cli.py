"""Test the program as users call it: bad input gives one line that names option and remedy, and exit status 2."""

import errno
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import BaseModel, ValidationError

from agentspec import __version__
from agentspec.cache.store import open_store
from agentspec.cli import main
from agentspec.cli.app import serve
from agentspec.errors import StoreUnavailableError, first_line
from agentspec.server_ext.vllm_adapter.startup.launch import OPTIONS, missing_folder


class Program:
    """Run the command line in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        # What a command writes into the environment must not outlive the test.
        monkeypatch.setenv("AGENTSPEC_STORE", "memory://")
        for variable in ("AGENTSPEC_TENANT", "AGENTSPEC_RECORD"):
            monkeypatch.setenv(variable, "")

    def __call__(self, *arguments: str) -> tuple[int, str]:
        """Return the exit status, and everything printed."""
        self._monkeypatch.setattr(sys, "argv", ["agentspec", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        printed = self._capsys.readouterr()
        return int(end.value.code or 0), printed.out + printed.err


@pytest.fixture
def agentspec(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    """Return the program, to be called with arguments."""
    return Program(monkeypatch, capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-pp", "2"), "--tensor-parallel-size"),
        (("--store", "foo://x[/db]"), "sqlite:///"),
        (("--max-draft", "1000"), "between 1 and 128"),
        (("--verify-cost", "7"), "verify_cost"),
        (("--tenant", "a\nb"), "tenant"),
        (("--speculative-config", "{}"), "--speculative-config"),
        (("--additional-config", '{"agentspec": {"max_tree": 1}}'), "max_tree"),
    ],
)
def test_bad_options_of_serve(agentspec: Program, arguments: tuple[str, ...], message: str) -> None:
    status, printed = agentspec("serve", "no-such-model", *arguments)
    assert status == 2
    assert message in printed
    assert "Traceback" not in printed


def test_a_store_file_of_another_kind_is_named_and_left_alone(agentspec: Program, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("these are my notes, not a database")
    status, printed = agentspec("serve", "no-such-model", "--store", f"sqlite:///{file}")
    assert status == 2
    assert "notes.txt" in printed
    assert file.read_text() == "these are my notes, not a database"


def test_a_default_store_that_cannot_be_opened_stops_no_server_and_a_named_one_does(
    agentspec: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On a full disk, for example, the folder is writable but the file cannot be created."""

    def full(url: str, **_: object) -> None:
        raise StoreUnavailableError(f"{url}: database or disk is full")

    served: list[str | None] = []
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("AGENTSPEC_STORE", "")
    monkeypatch.setenv("AGENTSPEC_SETTINGS", "")
    monkeypatch.setattr("agentspec.server_ext.settings.open_store", full)
    monkeypatch.setattr(
        "agentspec.server_ext.vllm_adapter.startup.launch.run_vllm",
        lambda _: served.append(os.environ.get("AGENTSPEC_SETTINGS")),
    )
    assert agentspec("serve", "no-such-model", "--port", "0")[0] == 0
    assert served == ['{"store": "memory://"}']
    assert "disk is full" in caplog.text
    status, printed = agentspec("serve", "no-such-model", "--store", f"sqlite:///{tmp_path}/named.db")
    assert status == 2
    assert "disk is full" in printed
    monkeypatch.setenv("AGENTSPEC_STORE", "")
    monkeypatch.setenv("AGENTSPEC_SETTINGS", json.dumps({"store": f"sqlite:///{tmp_path}/named.db"}))
    assert agentspec("serve", "no-such-model", "--port", "0")[0] == 2
    assert len(served) == 1


def test_a_named_store_that_can_only_be_read_starts_no_server(
    agentspec: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise all its turns would wait, and be lost at the end."""
    url = f"sqlite:///{tmp_path}/named.db"
    open_store(url).close()
    allowed = os.access
    monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK and allowed(path, mode))  # for root, too
    status, printed = agentspec("serve", "no-such-model", "--store", url)
    assert status == 2
    assert "named.db: cannot be written" in printed
    open_store(url).close()  # to read it


def test_a_file_that_cannot_be_written_is_named_before_the_work(agentspec: Program, tmp_path: Path) -> None:
    problems, folder = tmp_path / "problems.jsonl", tmp_path / "out.jsonl"
    problems.write_text('{"id": "a", "prompt": "x"}\n')
    folder.mkdir()
    status, printed = agentspec("rollout", str(problems), "--model", "no-such-model", "--out", str(folder))
    named = f"agentspec: --out {folder}: cannot be written (Is a directory); give another file"
    assert status == 2 and printed.replace("\n", "") == named


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_behind_the_output_is_one_line(tmp_path: Path) -> None:
    record = tmp_path / "calls.jsonl"
    record.write_text('{"session": "s", "turn": 0, "prompt_token_ids": [1], "response_token_ids": [2, 3]}')
    command = [sys.executable, "-m", "agentspec", "simulate", str(record)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600)
    assert done.returncode == 2 and done.stderr.strip() == "agentspec: No space left on device"


@pytest.mark.parametrize("closed", ["1", "2", "0,1", "0,1,2"])
def test_a_closed_output_is_no_error(tmp_path: Path, closed: str) -> None:
    record = tmp_path / "calls.jsonl"
    record.write_text('{"session": "s", "turn": 0, "prompt_token_ids": [1], "response_token_ids": [2, 3]}')
    close = f"import os, sys; [os.close(n) for n in ({closed},)]; os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-c", close, sys.executable, "-m", "agentspec", "simulate", str(record)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stderr == ""
    assert ("tokens a step" in done.stdout) is (closed == "2")


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are bytes there")
def test_a_name_that_cannot_be_shown_is_no_error(tmp_path: Path) -> None:
    record = tmp_path / os.fsdecode(b"caf\xe9.jsonl")
    record.write_text('{"session": "s", "turn": 0, "prompt_token_ids": [1], "response_token_ids": [2, 3]}')
    for encoding in ("utf-8", "ascii"):
        command = [sys.executable, "-m", "agentspec", "simulate", str(record)]
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
        assert done.returncode == 0 and "tokens a step" in done.stdout, done.stderr


def test_a_store_of_a_wrong_type_is_no_traceback(agentspec: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.server_ext.vllm_adapter.startup.launch.run_vllm", lambda _: None)
    wrong = ("serve", "no-such-model", "--additional-config", '{"agentspec": {"store": 5}}')
    assert agentspec(*wrong)[0] == 0  # the environment names the store
    monkeypatch.delenv("AGENTSPEC_STORE")
    status, printed = agentspec(*wrong)
    assert status == 2 and "setting 'store'" in printed


NO_SUCH_METHOD = NotImplementedError("Unsupported speculative method: 'mtp'")


@pytest.mark.parametrize(
    "refusal",
    [
        TypeError("LLM got an unexpected keyword"),
        OSError("m is no model\nmore"),
        NO_SUCH_METHOD,
        RuntimeError("Engine core initialization failed. See root cause above."),  # as when memory is short
        AttributeError("'int' object has no attribute 'get'"),  # a number where vLLM takes a mapping
    ],
)
def test_what_vllm_refuses_of_a_rollout_is_one_line(
    agentspec: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise refusal

    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"id": "a", "prompt": "x"}\n')
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=refuse, SamplingParams=dict))
    status, printed = agentspec("rollout", str(problems), "--model", "m", "--out", str(tmp_path / "out.jsonl"))
    why = str(refusal).partition("\n")[0]
    assert status == 2 and printed == f"agentspec: model m: vLLM refuses it or its options: {why}\n"


IN_USE = "; give another --port; with --uds another path, or remove that file if no server listens there"


@pytest.mark.parametrize(
    ("refusal", "remedy"),
    [
        (OSError("m is no model\nmore"), ""),
        (OSError(errno.EADDRINUSE, "Address already in use"), IN_USE),
        (OverflowError("bind(): port must be 0-65535."), ""),
        (ValueError("VLLM_ALLOW_RUNTIME_LORA_UPDATING cannot be used with api_server_count > 1"), ""),
        (NO_SUCH_METHOD, ""),
    ],
)
def test_what_vllm_refuses_of_a_server_is_one_line(
    agentspec: Program, monkeypatch: pytest.MonkeyPatch, refusal: Exception, remedy: str
) -> None:
    def refuse() -> None:
        raise refusal

    monkeypatch.setenv("VLLM_PLUGINS", "")
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.cli.main", SimpleNamespace(main=refuse))
    status, printed = agentspec("serve", "m", "--port", "0")
    why = str(refusal).partition("\n")[0]
    assert status == 2 and printed == f"agentspec: m: vLLM ended with an error: {why}{remedy}\n"


@pytest.mark.parametrize(
    ("model", "is_missing"),
    [("no/such/folder", True), ("nosuch/", True), ("~/nosuch", True), ("owner/name", False), ("s3://a/b/c", False)],
)
def test_a_path_is_no_name_of_the_hub(model: str, is_missing: bool) -> None:
    assert ("no such folder" in missing_folder(model)) is is_missing


def test_a_model_whose_folder_is_missing_is_said_to_be(
    agentspec: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("Repo id must be in the form 'repo_name'")

    folder, problems = tmp_path / "model", tmp_path / "problems.jsonl"
    problems.write_text('{"id": "a", "prompt": "x"}\n')
    monkeypatch.setenv("VLLM_PLUGINS", "")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=refuse, SamplingParams=dict))
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.cli.main", SimpleNamespace(main=refuse))
    rollout = ("rollout", str(problems), "--out", str(tmp_path / "out.jsonl"), "--model", str(folder))
    for command in (("serve", str(folder), "--port", "0"), rollout):
        status, printed = agentspec(*command)
        assert status == 2 and printed.endswith("'repo_name' (there is no such folder)\n")
    folder.mkdir()
    for command in (("serve", str(folder), "--port", "0"), rollout):
        status, printed = agentspec(*command)
        assert status == 2 and printed.endswith("'repo_name'\n")


def test_an_error_behind_options_that_stand_before_the_model_names_no_option(
    agentspec: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise OSError("m is no model")

    monkeypatch.setenv("VLLM_PLUGINS", "")
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.cli.main", SimpleNamespace(main=refuse))
    status, printed = agentspec("serve", "--dtype", "float32", "m")
    assert status == 2 and printed == "agentspec: vLLM ended with an error: m is no model\n"


def test_the_list_of_serves_options_is_complete() -> None:
    assert inspect.signature(serve).parameters.keys() - {"context", "model"} == OPTIONS


class TestOptionsBeforeTheModel:
    """Test options before the model. vLLM takes them there, too, and its file of options may name the model."""

    SETTINGS = '{"agentspec": {"scope": "none"}}'
    METHOD = '{"method": "ngram", "num_speculative_tokens": 3}'

    @pytest.fixture
    def arguments(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Return the list that receives the arguments of vllm serve."""
        received: list[str] = []
        monkeypatch.setattr("agentspec.server_ext.vllm_adapter.startup.launch.run_vllm", received.extend)
        return received

    def test_settings_and_method_count(self, agentspec: Program, arguments: list[str]) -> None:
        given = ("--additional-config", self.SETTINGS, "--speculative-config", self.METHOD)
        assert agentspec("serve", *given, "--dtype", "float32", "m", "--verify-cost", "0.1")[0] == 0
        assert arguments[:3] == ["--dtype", "float32", "m"]
        assert arguments.count("--additional-config") == arguments.count("--speculative-config") == 1
        settings = json.loads(arguments[arguments.index("--additional-config") + 1])
        assert settings == {"agentspec": {"scope": "none", "verify_cost": 0.1}}
        method = json.loads(arguments[arguments.index("--speculative-config") + 1])
        assert method["method"] == "ngram"

    def test_a_file_that_names_the_model_counts(self, agentspec: Program, arguments: list[str], tmp_path: Path) -> None:
        file = tmp_path / "vllm.yaml"
        file.write_text(f"model: m\nadditional-config: {self.SETTINGS}\n")
        assert agentspec("serve", "--config", str(file))[0] == 0
        assert arguments[:2] == ["--config", str(file)]
        settings = json.loads(arguments[arguments.index("--additional-config") + 1])
        assert settings == {"agentspec": {"scope": "none"}}

    def test_what_excludes_drafts_is_refused(self, agentspec: Program, arguments: list[str]) -> None:
        status, printed = agentspec("serve", "--pipeline-parallel-size", "2", "m")
        assert status == 2 and "--pipeline-parallel-size 2" in printed and not arguments


def test_the_field_of_a_wrong_option_is_quoted() -> None:
    class Options(BaseModel):
        length: int

    with pytest.raises(ValidationError) as error:
        Options.model_validate({"length": "x"})
    assert first_line(error.value).startswith("length: Input should be a valid integer")


def test_the_store_of_a_rollout_is_not_in_what_vllm_prints(
    agentspec: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's URL may hold a password. The option wins over the environment, as with serve."""
    given: dict[str, object] = {}

    def refuse(_: str, **options: object) -> None:
        given.update(options, store=os.environ["AGENTSPEC_STORE"])
        raise ValueError

    problems, url = tmp_path / "problems.jsonl", "redis://:hunter2@localhost:1/0"
    problems.write_text('{"id": "a", "prompt": "x"}\n')
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=refuse, SamplingParams=dict))
    agentspec("rollout", str(problems), "--model", "m", "--out", str(tmp_path / "out.jsonl"), "--store", url)
    assert given.pop("store") == url and "hunter2" not in str(given)


def test_a_plain_rollout_asks_vllm_for_nothing_of_drafts(
    agentspec: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM refuses to report figures of drafts without drafts, and AGENTSPEC=1 would switch drafts on."""
    given: dict[str, object] = {}

    def refuse(_: str, **options: object) -> None:
        given.update(options, switch=os.environ["AGENTSPEC"])
        raise ValueError

    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"id": "a", "prompt": "x"}\n')
    monkeypatch.setenv("AGENTSPEC", "1")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=refuse, SamplingParams=dict))
    agentspec("rollout", str(problems), "--model", "m", "--out", str(tmp_path / "out.jsonl"), "--plain")
    assert given.keys() == {"dtype", "enforce_eager", "seed", "logprobs_mode", "switch"} and given["switch"] == "0"


@pytest.mark.parametrize("text", ["1 / 0", "def score(:", "import sys; sys.exit(0)"])
def test_a_reward_whose_module_fails_is_named(
    agentspec: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"id": "a", "prompt": "x"}\n')
    (tmp_path / "broken_rewards.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    status, printed = agentspec("rollout", str(problems), "--model", "m", "--reward", "broken_rewards:score")
    assert status == 2 and "--reward broken_rewards:score: " in printed and "Traceback" not in printed


def test_a_password_does_not_reach_the_error(agentspec: Program) -> None:
    status, printed = agentspec("serve", "no-such-model", "--store", "redis://:hunter2@localhost:notaport/0")
    assert status == 2
    assert "hunter2" not in printed


def test_help_lists_the_commands(agentspec: Program) -> None:
    status, printed = agentspec("--help")
    assert status == 0
    assert "serve" in printed


@pytest.mark.engine
def test_help_about_a_subject_is_vllms(agentspec: Program) -> None:
    status, printed = agentspec("serve", "--help")
    assert status == 0 and "--verify-cost" in printed and "--help=all" in printed
    command = [sys.executable, "-m", "agentspec", "serve", "--help=max-num-seqs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert "--max-num-seqs MAX_NUM_SEQS" in done.stdout and "--verify-cost" not in done.stdout


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agentspec", "version"], capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout.strip()[0].isdigit()


def test_the_version_is_an_option_too(agentspec: Program) -> None:
    assert agentspec("--version") == agentspec("version") == (0, __version__ + "\n")
