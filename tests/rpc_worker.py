"""Runs paired models in a Python whose llama_cpp has RPC: python rpc_worker.py JOB, both JOB and the answer in JSON.

JOB: {"models": [options of twobit_gguf.Llama, …], "prompts": […], "n_predict": tokens, "logits": file.npz}. All models
are loaded first, then each prompt is given to each of them in turn. The answer has for each model its texts, their
tokens, at each token the gap between the two best log-probabilities, and the counters of one single-token evaluation.
The npz file has the logits of TEXT for each model, "0", "1", …: (tokens, vocabulary).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import numpy as np

from twobit_gguf import Llama, plugin

TEXT = b"it was the best of times, it was the worst of times"


def main(job: dict) -> None:
    options = {"n_ctx": 512, "n_threads": 2, "n_threads_batch": 2, "logits_all": True, "verbose": True}
    models = [Llama(**{**options, **model}) for model in job["models"]]
    answers: list[dict] = [{"texts": [], "tokens": [], "gaps": []} for _ in models]
    for prompt in job["prompts"]:
        for model, answer in zip(models, answers, strict=True):
            choice = model(prompt, max_tokens=job["n_predict"], temperature=0, logprobs=2)["choices"][0]
            best = [sorted(top.values())[-2:] for top in choice["logprobs"]["top_logprobs"]]
            answer["texts"].append(choice["text"])
            answer["tokens"].append(choice["logprobs"]["tokens"])
            answer["gaps"].append([float(pair[-1] - pair[0]) for pair in best])
    logits = {}
    for i, (model, answer) in enumerate(zip(models, answers, strict=True)):
        model.reset()
        plugin.reset_counters()
        model.eval([model.token_bos()])
        answer["counters"] = asdict(plugin.counters())
        model.eval(model.tokenize(TEXT, add_bos=False))
        logits[str(i)] = model.scores[: model.n_tokens].copy()
    np.savez(job["logits"], **logits)
    for model in models:
        model.close()
    print(json.dumps({"models": answers, "pairs_alive": plugin.counters().pairs_alive}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
