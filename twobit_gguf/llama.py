"""Llama: llama_cpp.Llama for paired GGUFs. The 2-bit base drafts, base + residual verifies, in one context.

    llm = Llama("out.gguf")                     # all layers on TWOBIT0, speculative decoding
    llm("Once upon a time", max_tokens=64)
    llm.speculation_stats.tokens_per_verification
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import platform
import re
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import llama_cpp
import llama_cpp.llama_cpp as llama_c
import numpy as np

from . import _native, format, gguf_file, grammar, plugin
from .errors import MissingResidual, TwobitError
from .format import PairedFile
from .machine import cpu_name, physical_cores
from .speculative import SpeculationOptions, SpeculationStats, Speculator

Mode = Literal["speculative", "full", "draft"]

_STOPPING = list(inspect.signature(llama_cpp.Llama.generate).parameters).index("stopping_criteria") - 2  # behind self and tokens

_SMALLEST_CONTEXT, _SMALLEST_BATCH = 256, 32


class Llama(llama_cpp.Llama):
    """A llama_cpp.Llama that also loads paired GGUFs; all calls of llama_cpp.Llama work as they do there.

    A GGUF without a residual is run exactly as llama_cpp.Llama would, whatever the options below say.

    Args:
        model_path: the paired GGUF.
        mode: speculative (the text of full mode, faster), full (base + residual, one token a step) or draft (the 2-bit base alone).
        device: the device or devices that the layers go to, by name; all TWOBITn by default.
        n_gpu_layers: layers on the device, -1 for all. The weights of the others stay in RAM and have their residuals as well.
        residual_path: the residual's own file, where it is neither in the model's file nor beside it.
        speculation: shape and limits of speculative mode.
        populate: read the residual into RAM while loading. mlock_residual: and keep it there.
        verify_checksums: compare the checksum of every pair while loading.
        rpc_servers: "host:port,…": ggml RPC servers whose devices join.
        n_threads: as in llama_cpp.Llama, but all physical cores by default.
        **kwargs: of llama_cpp.Llama. flash_attn is on by default: speculative greedy text is then the very text of full mode.

    Raises:
        TwobitError: the file is damaged or the residual belongs to another model; the plugin is missing; one line.
        MemoryError: mlock_residual, and not enough RAM.
        ValueError: llama.cpp does not take the file.
    """

    def __init__(
        self,
        model_path: str,
        *,
        mode: Mode = "speculative",
        device: str | Sequence[str] | None = None,
        n_gpu_layers: int | None = None,
        residual_path: str | None = None,
        speculation: SpeculationOptions | None = None,
        populate: bool = False,
        mlock_residual: bool = False,
        verify_checksums: bool = True,
        rpc_servers: str | None = None,
        n_threads: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._speculator: Speculator | None = None
        self._speculation = speculation or SpeculationOptions()
        self._resting: dict[SpeculationOptions, Speculator] = {}
        self._pieces: dict[int, bytes] = {}
        self._twobit_kwargs = {
            "mode": mode, "device": device, "residual_path": residual_path, "speculation": speculation, "populate": populate,
            "mlock_residual": mlock_residual, "verify_checksums": verify_checksums, "rpc_servers": rpc_servers,
        }  # fmt: skip
        self._devices: Any = None  # the NULL-terminated list that model_params points to
        self._can_speculate = self._recurrent = False
        self.paired: PairedFile | None = None
        self._mode: Mode = mode
        _check_mode(mode)
        model_path = os.fspath(model_path)

        if rpc_servers:
            plugin.load()
            for endpoint in rpc_servers.split(","):
                plugin.add_rpc_server(endpoint)
        self.paired = open_if_paired(model_path, residual_path)
        weights = not kwargs.get("vocab_only")
        if self.paired is None:
            if device is not None:
                self._devices = device_list([device] if isinstance(device, str) else device)
            try:
                super().__init__(model_path, n_gpu_layers=n_gpu_layers or 0, n_threads=n_threads, **kwargs)
            except ValueError:
                gguf_file.open_gguf(Path(model_path))  # says what is wrong with it, if we know
                raise
            if weights:
                self._fit_arrays()
            return

        if n_gpu_layers is None:
            n_gpu_layers = -1
        plugin.load()
        self._devices = device_list(device_names(device))
        advice = plugin.memory_advice(_ram_bytes(self.paired), mlock=mlock_residual)
        if advice:
            print(f"twobit: {model_path}: {advice}", file=sys.stderr)
        # With flash attention every query is computed alike, whatever the width of the batch and the branches in the cache: without it
        # speculation would change the last digits, and now and then a token.
        kwargs.setdefault("flash_attn", True)
        with attached(self.paired, populate=populate, mlock=mlock_residual, verify=verify_checksums, weights=weights):
            super().__init__(
                model_path, n_gpu_layers=n_gpu_layers, n_threads=n_threads or physical_cores(), **_with_room(kwargs, self._speculation)
            )
        if weights:
            self._fit_arrays()
        if weights and verify_checksums and not self.context_params.embeddings:
            self._check_weights()

    # ---- what llama_cpp.Llama's constructor makes, adjusted on the way ----

    @property
    def model_params(self) -> llama_c.llama_model_params:
        """llama.cpp's parameters of the model; they name our devices."""
        return self._model_params

    @model_params.setter
    def model_params(self, params: llama_c.llama_model_params) -> None:
        if self._devices is not None:
            params.devices = ctypes.addressof(self._devices)  # type: ignore[assignment]
        self._model_params = params

    @property
    def _model(self) -> Any:
        return self._loaded_model

    @_model.setter
    def _model(self, model: Any) -> None:
        """The model is loaded and its context not yet made: the moment to decide how many sequences it needs."""
        self._loaded_model = model
        if self.paired is None or self.context_params.embeddings:
            return
        self._can_speculate = True
        self._recurrent = bool(llama_c.llama_model_is_recurrent(model.model) or llama_c.llama_model_is_hybrid(model.model))
        if self._recurrent and self._mode == "speculative" and self._speculation.shape != "chain":
            _say_once(f"{self.model_path}: this architecture's memory goes back to copies only: drafts are chains")
        self.context_params.kv_unified = True
        self.context_params.n_seq_max = 2 if self._recurrent else self._speculation.n_seq
        self.context_params.swa_full = True  # a window that forgets could not be rolled back

    # ---- modes ----

    @property
    def mode(self) -> str:
        """speculative, full or draft; may be set between calls."""
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        _check_mode(mode)
        self._settle()
        if mode != self._mode and "draft" in (mode, self._mode):
            self.reset()  # cells of the draft must not serve the verifier, nor the other way round
        self._mode = mode

    @property
    def speculation(self) -> SpeculationOptions:
        """Shape and limits of speculative mode; may be set between calls. Statistics and what was learnt are kept for each apart.

        Raises:
            TwobitError: the shape needs more sequences than the model was loaded for; load it with the tree for all three.
        """
        return self._speculation

    @speculation.setter
    def speculation(self, options: SpeculationOptions) -> None:
        self._settle()
        if self._can_speculate and not self._recurrent and options.n_seq > self.context_params.n_seq_max:
            raise TwobitError(
                f"a {options.shape} takes {options.n_seq} sequences, the context was made for {self.context_params.n_seq_max}: "
                "load the model with speculation=SpeculationOptions(shape=\"tree\")"
            )
        if self._speculator is not None:
            self._resting[self._speculation] = self._speculator
        self._speculation = options
        self._speculator = self._resting.pop(options, None)

    @property
    def speculation_stats(self) -> SpeculationStats:
        """What speculation did since the model was loaded (or since stats.reset())."""
        return self._engine().stats if self._can_speculate else SpeculationStats()

    @property
    def speculation_costs(self) -> dict[str, object] | None:
        """Measured milliseconds of a draft pass and of verifications; None before the first speculative call."""
        costs = self._speculator.costs if self._speculator is not None else None
        return costs.to_dict() if costs is not None else None

    @contextlib.contextmanager
    def _decoding(self) -> Iterator[None]:
        """Around a decode: the mode, and the plugin's reason if it fails."""
        if self.paired is None:
            yield
            return
        with plugin.mode("draft" if self._mode == "draft" else "full"), self._reasons():
            yield

    @contextlib.contextmanager
    def _reasons(self) -> Iterator[None]:
        """Puts the plugin's own line in the place of llama_decode's bare code."""
        try:
            yield
        except RuntimeError as error:
            reason = _native.last_error()
            if self.paired is None or self.paired.path.name not in reason or isinstance(error, _native.NativeError):
                raise
            raise _native.NativeError(reason) from error

    # ---- llama_cpp.Llama's calls that decode or move the state ----

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluates tokens, in full mode unless mode is draft."""
        self._settle()
        with self._decoding():
            super().eval(tokens)

    def _check_weights(self) -> None:
        """One decode: what llama.cpp maps rather than reads has its checksums compared at its first use."""
        try:
            self.eval([max(self.token_bos(), 0)])
        except RuntimeError:
            self.close()
            raise
        self._ctx.kv_cache_clear()
        self.reset()

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """Embeddings of the full model (of the base in draft mode); the model must be loaded with embedding=True."""
        with self._decoding():
            return super().embed(*args, **kwargs)

    def reset(self) -> None:
        """Forgets the text."""
        self._settle()
        super().reset()

    def save_state(self) -> llama_cpp.LlamaState:
        """The state of the verified text."""
        self._settle()
        return super().save_state()

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Goes back to a state."""
        self._settle()
        super().load_state(state)
        self._fit_arrays()

    def close(self) -> None:
        """Frees the model."""
        self._speculator = None
        if hasattr(self, "_stack"):  # not there if the constructor refused the file
            super().close()

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        """Text of tokens. A completion asks for its whole text once a token: pieces are kept, so that this stays cheap."""
        if special or type(self.tokenizer_) is not llama_cpp.LlamaTokenizer or self._token_bos in tokens:
            return super().detokenize(tokens, prev_tokens=prev_tokens, special=special)
        pieces = self._pieces
        for token in tokens:
            if token not in pieces:
                pieces[token] = super().detokenize([token])
        return b"".join([pieces[token] for token in tokens])

    def _init_sampler(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("grammar") is not None:
            grammar.check(kwargs["grammar"], self._loaded_model.vocab)
        return super()._init_sampler(*args, **kwargs)

    @property
    def _token_bos(self) -> int:
        return self._loaded_model.token_bos()

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """Tokens behind a prompt, as llama_cpp.Llama.generate; in speculative mode the same distribution, faster."""
        self._settle()
        if not self._can_speculate or self._mode != "speculative" or self.draft_model is not None:
            yield from super().generate(tokens, *args, **kwargs)
            return
        # llama_cpp.Llama reads the prompt, reuses the prefix that is there already, makes the sampler and draws the first token.
        plain = super().generate(tokens, *args, **kwargs)
        first = next(plain, None)
        plain.close()
        if first is None:
            return
        self._engine().stats.tokens += 1
        yield first  # what is sent in would be a draft in llama_cpp.Llama; we have our own
        stopping = args[_STOPPING] if len(args) > _STOPPING else kwargs.get("stopping_criteria")
        yield from self._speculate(first, stopping)

    def _speculate(self, token: int, stopping: Any) -> Generator[int, Sequence[int] | None, None]:
        """Goes on behind `token`, which has been drawn and not yet evaluated."""
        engine, stats, sampler = self._engine(), self._engine().stats, self._sampler
        assert sampler is not None
        engine.new_text()
        roots = [token]
        try:
            while True:
                with self._reasons():
                    step = engine.step(roots, self.n_tokens)
                for root in roots:
                    self._append(root)
                while True:
                    if self._logits_all:
                        self.scores[self.n_tokens - 1] = engine.logits(step)
                    begin = time.perf_counter()
                    token = sampler.sample(self._ctx, step.row)
                    stats.seconds["sample"] += time.perf_counter() - begin
                    stats.tokens += 1
                    if stopping is not None and stopping(self._input_ids, engine.logits(step).copy()):
                        return
                    yield token
                    if not engine.sampled(step, token):
                        break
                    self._append(token)
                again = engine.settle()
                self.n_tokens = engine.n_settled
                self._requires_eval = True
                roots = [*again, token]
        finally:
            self._settle()
            engine.remember()

    def _fit_arrays(self) -> None:
        """llama.cpp rounds a context up to 256s; llama_cpp's arrays have the size that was asked for, or that of a state's context."""
        if len(self.input_ids) < self._n_ctx:
            self.input_ids = np.concatenate([self.input_ids, np.zeros(self._n_ctx - len(self.input_ids), self.input_ids.dtype)])
        if self._logits_all and len(self.scores) < self._n_ctx:
            self.scores = np.concatenate([self.scores, np.zeros((self._n_ctx - len(self.scores), self._n_vocab), self.scores.dtype)])

    def _append(self, token: int) -> None:
        self.input_ids[self.n_tokens] = token
        self.n_tokens += 1

    def _settle(self) -> None:
        """Brings cells and counts back to what llama_cpp.Llama expects: n_tokens positions in sequence 0, no other sequences."""
        if self._speculator is None or self._ctx.ctx is None:
            return
        again: list[int] = []
        if self._speculator.is_open:
            again = self._speculator.settle()
            n_settled = self._speculator.n_settled
            again = again[: max(self.n_tokens - n_settled, 0)]  # an interrupt may have come between decoding and counting
            self.n_tokens = min(self.n_tokens, n_settled)
            # the rows of a tree are not those of a text: an exact prompt match must not sample from them
            self._requires_eval = True
            if not self._speculator.trim(self.n_tokens):
                self._ctx.kv_cache_clear()
                self.n_tokens = 0
        self._speculator.unmirror()
        if again:
            self.eval(again)

    def _engine(self) -> Speculator:
        if self._speculator is None:
            vocab = self._loaded_model.vocab
            self._speculator = Speculator(
                self._ctx.ctx,
                n_vocab=self._n_vocab,
                n_ctx=self._n_ctx,
                n_batch=min(self.n_batch, self.context_params.n_ubatch),
                options=self._speculation,
                is_end=lambda token: bool(llama_c.llama_vocab_is_eog(vocab, token)),
                history=lambda: self.input_ids,
                costs_key=self._costs_key(),
                recurrent=self._recurrent,
            )
        return self._speculator

    def _costs_key(self) -> str:
        status = os.stat(self.model_path)
        library = os.stat(_native.library_path())
        params = self.context_params
        return (
            f"{os.path.realpath(self.model_path)} {status.st_size} {status.st_mtime_ns} {library.st_mtime_ns} {platform.node()} "
            f"{cpu_name()} {self._device_names} {self.model_params.n_gpu_layers} {params.n_threads} {params.n_threads_batch} "
            f"{params.type_k} {params.type_v} {params.flash_attn_type} {params.offload_kqv} {self._speculation.n_seq}"
        )

    @property
    def _device_names(self) -> list[str]:
        return [device.name for device in plugin.devices()]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **self._twobit_kwargs, "mode": self._mode}


# ---- loading ---------------------------------------------------------------------------------------------------------


def open_if_paired(model_path: str, residual_path: str | None = None) -> PairedFile | None:
    """The paired file, checked but for its tensors' bytes; None if it is a plain GGUF, or has lost its residual, which is said on stderr.

    Raises:
        TwobitError: it is paired and damaged.
    """
    try:
        main = gguf_file.open_gguf(Path(model_path))
    except TwobitError:
        return None  # llama.cpp may know better, and says so if it does not
    if not format.is_paired(main):
        return None
    try:
        return format.open_paired(Path(model_path), Path(residual_path) if residual_path else None)
    except MissingResidual as error:
        print(f"twobit: WARNING: {error}; it runs as a 2-bit model", file=sys.stderr)
        return None


@contextlib.contextmanager
def attached(
    paired: PairedFile, *, populate: bool = False, mlock: bool = False, verify: bool = True, weights: bool = True
) -> Iterator[None]:
    """Around the load of a paired file: tells the plugin where the residual is, and complains if any pair was not taken."""
    residual = None if paired.residual_path == paired.path else paired.residual_path
    before = plugin.counters().pairs_alive
    with plugin.attach(paired.path, residual, populate=populate, mlock=mlock, verify=verify):
        try:
            yield
        except ValueError as error:
            reason = _native.last_error()
            if reason and paired.path.name in reason:
                raise TwobitError(reason) from error
            raise
    taken = plugin.counters().pairs_alive - before
    if weights and taken < len(paired.pairs):
        print(
            f"twobit: WARNING: {paired.path}: {taken} of {len(paired.pairs)} weights have their residual, the others run at 2 bits; "
            "put layers on TWOBIT devices only; those that n_gpu_layers (-ngl) leaves in RAM have theirs, too",
            file=sys.stderr,
        )


def device_names(device: str | Sequence[str] | None) -> list[str]:
    """The devices a user named, all TWOBITn by default."""
    if isinstance(device, str):
        return device.split(",")
    if device is not None:
        return list(device)
    return [d.name for d in plugin.devices() if re.fullmatch(r"TWOBIT\d+", d.name)]


def device_list(names: Iterable[str]) -> Any:
    """The NULL-terminated array for llama_model_params.devices; keep it as long as those are used."""
    handles = [plugin.device_handle(name) for name in names]
    return (ctypes.c_void_p * (len(handles) + 1))(*handles, None)


def _ram_bytes(paired: PairedFile) -> int:
    """The residual, and the main part where no GPU takes it."""
    residual = sum(pair.residual_nbytes for pair in paired.pairs)
    on_gpu = any(d.type in ("GPU", "IGPU") and not d.name.startswith("TWOBIT") for d in plugin.devices())
    return residual + (0 if on_gpu else paired.main.end)


def _check_mode(mode: str) -> None:
    if mode not in get_args(Mode):
        raise TwobitError(f"no mode {mode!r}: speculative, full or draft")


_said: set[str] = set()


def _say_once(line: str) -> None:
    if line not in _said:
        _said.add(line)
        print(f"twobit: {line}", file=sys.stderr)


def _with_room(kwargs: dict[str, Any], speculation: SpeculationOptions) -> dict[str, Any]:
    """A context and batches that hold a token of every sequence: with less llama.cpp aborts the process."""
    width = max(_SMALLEST_BATCH, speculation.n_seq)
    n_ctx, n_batch, n_ubatch = (kwargs.get(name, 512) for name in ("n_ctx", "n_batch", "n_ubatch"))
    return kwargs | {
        "n_ctx": max(n_ctx, _SMALLEST_CONTEXT) if n_ctx else n_ctx, "n_batch": max(n_batch, width), "n_ubatch": max(n_ubatch, width),
    }  # fmt: skip
