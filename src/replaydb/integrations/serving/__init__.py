"""Completions of inference engines as episodes: vLLM, SGLang, and servers with OpenAI's API.

Nothing of these packages is imported: what they return is read by the names of its fields, whether
it is an object, or JSON as it came over HTTP.

    completions = from_vllm(llm.generate(prompt, SamplingParams(n=8, logprobs=0))[0])
    rewards = [grade(one.text) for one in completions]
    await buffer.put(to_group("gsm8k", completions, rewards=rewards))

A token that was sampled has a logprob above minus infinity. Where a server says otherwise (None,
NaN, -inf, or vLLM's -9999.0 over HTTP) it did not record one, and the logprob is NaN.
"""

from __future__ import annotations

from replaydb.integrations.serving.completion import Completion, to_group
from replaydb.integrations.serving.openai import from_openai
from replaydb.integrations.serving.sglang import from_sglang
from replaydb.integrations.serving.vllm import from_vllm

__all__ = ["Completion", "from_openai", "from_sglang", "from_vllm", "to_group"]
