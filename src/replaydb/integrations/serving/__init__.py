"""Conversion of inference engine outputs to episodes: vLLM, SGLang, OpenAI-compatible servers.

None of these packages is imported. Their outputs, Python objects or JSON from HTTP responses, are
read by field name.

    completions = from_vllm(llm.generate(prompt, SamplingParams(n=8, logprobs=0))[0])
    rewards = [grade(one.text) for one in completions]
    await buffer.put(to_group("gsm8k", completions, rewards=rewards))

A sampled token has a logprob above minus infinity. If a server reports None, NaN, -inf, or vLLM's
-9999.0 over HTTP, it did not record the logprob, which is then NaN.
"""

from __future__ import annotations

from replaydb.integrations.serving.completion import Completion, to_group
from replaydb.integrations.serving.openai import from_openai
from replaydb.integrations.serving.sglang import from_sglang
from replaydb.integrations.serving.vllm import from_vllm

__all__ = ["Completion", "from_openai", "from_sglang", "from_vllm", "to_group"]
