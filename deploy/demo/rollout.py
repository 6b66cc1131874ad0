"""The engine's process: the tiny model under continuous batching, its routes captured, its tokens on stdout.

One JSON line per finished or cancelled request, then one with the engine's own counts.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import msgspec
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from deploy.demo.figures import EngineReport, Rollout
from deploy.demo.workload import PAGE_SIZE, SIBLINGS, Request, workload
from engine_side.engines.transformers import capture_routes
from tests.harness.tiny import load_tiny

_DEADLINE_S = 300.0


def main() -> None:
    """Run every request of the workload and print its tokens."""
    ask = argparse.ArgumentParser()
    ask.add_argument("--collector", required=True)
    ask.add_argument("--dtype", choices=("fp32", "bf16"), required=True)
    ask.add_argument("--seed", type=int, required=True)
    args = ask.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = load_tiny(torch.float32 if args.dtype == "fp32" else torch.bfloat16, attention="sdpa")
    started = time.monotonic()
    with capture_routes(model, collector=args.collector, engine_id=f"engine-{args.dtype}") as capture:
        _run(model, capture, workload(args.dtype, args.seed), args.seed)
    _say(EngineReport(capture.stats().as_dict(), time.monotonic() - started))


def _run(model: Any, capture: Any, requests: list[Request], seed: int) -> None:
    generation = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=64, eos_token_id=-1, pad_token_id=0
    )
    # Small on purpose: prompts are prefilled in chunks, and the cache cannot hold every request, so some are preempted.
    batching = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=52,
        max_batch_tokens=192,
        return_logprobs=True,
        seed=seed,
        use_cuda_graph=False,
        use_async_batching=False,
        safety_margin=0.0,
    )
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching
    ) as manager:
        waiting: dict[str, Request] = {}
        for request in requests:
            waiting.update(dict.fromkeys(request.names, request))
            manager.num_return_sequences = SIBLINGS if request.group else 1
            manager.add_request(
                request.prompt,
                request.request_id,
                max_new_tokens=request.new_tokens,
                streaming=request.cancel_after > 0,
            )
        cancelled = _collect(manager, capture, waiting)
    # After the engine's last step: everything a cancelled request had been given has been streamed by now.
    while (output := manager.get_result(timeout=0.0)) is not None:
        cancelled[capture.client_id(output.request_id)] = output
    for name, output in cancelled.items():
        _say(_rollout(name, output, cancelled=True))


def _collect(manager: Any, capture: Any, waiting: dict[str, Request]) -> dict[str, Any]:
    """Print what finishes; returns the last streamed output of each request that was cancelled."""
    deadline = time.monotonic() + _DEADLINE_S
    streamed: dict[str, Any] = {}
    while waiting:
        output = manager.get_result(timeout=1.0)
        if time.monotonic() > deadline or not manager.is_running():
            raise SystemExit(f"engine: {len(waiting)} requests did not come back: {sorted(waiting)[:4]} …")
        if output is None:
            continue
        name = capture.client_id(output.request_id)
        if name in streamed or (name in waiting and waiting[name].cancel_after):
            streamed[name] = output
            if name in waiting and len(output.generated_tokens) >= waiting[name].cancel_after:
                manager.cancel_request(output.request_id)
                del waiting[name]
        elif output.is_finished():
            del waiting[name]
            _say(_rollout(name, output, cancelled=False))
    return streamed


def _rollout(name: str, output: Any, cancelled: bool) -> Rollout:
    tokens = [*output.prompt_ids, *output.generated_tokens]
    return Rollout(name, len(output.prompt_ids), tokens, output.logprobs, cancelled)


def _say(message: Rollout | EngineReport) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
