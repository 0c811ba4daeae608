"""Models whose samples may not share packs, or not as the run says."""

from __future__ import annotations

import attrs

from packplan.core.errors.base import UserError, VerificationError


@attrs.define(eq=False)
class IsolationError(UserError):
    """Samples of one pack might see each other, or would not train as they do alone."""

    model_type: str
    attn_impl: str
    reason: str

    def _text(self) -> str:
        other = "" if self.attn_impl == "auto" else "set model.attn_impl: auto, or "
        return (
            f"{self.model_type} may not pack under model.attn_impl {self.attn_impl}: {self.reason}; "
            f"{other}set training.packing: false"
        )


@attrs.define(eq=False)
class ProbeError(UserError):
    """A model cannot be asked whether it keeps the samples of a pack apart."""

    model_type: str
    reason: str

    def _text(self) -> str:
        return f"whether {self.model_type} keeps the samples of a pack apart cannot be proven: {self.reason}"


@attrs.define(eq=False)
class AttentionError(UserError):
    """An attention backend does not run as the run is configured."""

    attn_impl: str
    why_not: str
    instead: str

    def _text(self) -> str:
        return f"model.attn_impl {self.attn_impl} cannot be taken: {self.why_not}; use model.attn_impl: {self.instead}"


@attrs.define(eq=False)
class UnequalError(VerificationError):
    """Packed samples do not give what they give alone."""

    checks: tuple[str, ...]

    def _text(self) -> str:
        return (
            f"packed training is not the same training: {', '.join(self.checks)} differ; do not pack with this model "
            "and "
            "attention backend (model.attn_impl: another one, or training.packing: false)"
        )
