"""``Executor``: the part of an op below autograd and autocast. It binds a call, picks a kernel and runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

from shiplap.declare.binding import Binding
from shiplap.declare.kernel import Kernel
from shiplap.declare.values import Args, Result, Returned, Value
from shiplap.dispatch import tuned_choices
from shiplap.dispatch.autograd import RecordCall, detach_results
from shiplap.dispatch.check_unchanged import places_of, require_places
from shiplap.dispatch.launch import refuse_capture
from shiplap.dispatch.outputs import check_outputs, with_own_memory
from shiplap.dispatch.state import OpState
from shiplap.errors import ShiplapError, error, notice
from shiplap.settings import settings
from shiplap.torch_private import dispatcher_calls, dispatcher_transforms
from shiplap.torch_private.dispatcher_library import Overload


class Executor(OpState):
    """The executor of an op's calls: the methods that torch's dispatcher, generated functions and native code call.

    Attributes:
        overload: the registered ``torch.ops.<namespace>.<name>.default``.
        raw: its overload ``torch.ops.<namespace>.<name>.raw``, below autograd and autocast, which plain eager calls and
            Inductor's code call. It is ``overload`` itself where the op has no autograd implementation. Modes, tensor
            subclasses and graphs are shown ``overload``, so that a graph can be trained however it was traced.
        record: the implementation that autograd calls, if the op has ``raw``.
        separable: whether a call that neither autograd nor autocast has to see may go to ``raw`` directly. An op with
            lists of tensors is not separable, since looking for gradients in every list would be too slow.
    """

    overload: Overload
    raw: Overload
    record: RecordCall
    separable: bool
    short: Callable[..., Result] | None = None  # a shorter way than `serve_call`, see dispatch/eager_fast_path.py

    def execute(self, *args: Value, **kwargs: Value) -> Result:
        """Check and bind the arguments, pick a kernel and run it. This is the implementation that torch calls."""
        if self.short is None or kwargs or (torch.is_grad_enabled() and dispatcher_calls.any_requires_grad(*args)):
            return self.serve_call(*args, **kwargs)
        return self.short(*args)

    def serve_call(self, *args: Value, **kwargs: Value) -> Result:
        """Execute a call without the fast path of calls that were seen before."""
        given = self.spec.complete(args, kwargs) if kwargs else args
        call = self.plan.quick(*given)
        return self.serve(call, self.pick(call))

    def refusal(self, cause: Exception) -> ShiplapError | None:
        """Return the catalogue error behind an exception of native code. Its Python class is lost in C++.

        None for an exception that the native code of this op did not raise.
        """
        return self.entrance.refusal(cause) if self.entrance is not None else None

    def refuse_vmap(self, *args: Value, **kwargs: Value) -> NoReturn:
        """Raise SL317 for a mapped call of ``op.out``."""
        got = "a call of op.out under torch.vmap"
        raise error("SL317", where=self.spec.name, got=got, expected="a call that returns new tensors")

    def pick(self, call: Binding) -> Kernel | None:
        """The kernel for this bound call, or None if the reference has to run. The reason for None is reported once."""
        if self.spec.dynamic:
            refuse_capture(self.spec, call.device)
        if tuned_choices.active and not isinstance(
            choice := tuned_choices.find_choice(self, call), tuned_choices.MissingChoice
        ):
            return choice
        device, reasons = call.device.type, []
        for kernel in self.eager_kernels(device):
            if not isinstance(serving := kernel.serving(call), str):
                return serving
            reasons.append(f"{kernel.name}: {serving}")
        if device not in self.spec.reference_is_fast_on:
            names = [k.name for k in self.kernels.get(device, ())]  # the reason may hold sizes: it is no key
            others = f", only for {' and '.join(self.kernels)}" if self.kernels else ""
            self._report_reference_runs(device, "; ".join(reasons) or f"no kernel for {device}{others}", key=str(names))
        return None

    def serve(self, call: Binding, kernel: Kernel | None) -> Result:
        """Run a bound call with the picked kernel, or with the reference."""
        if torch.is_grad_enabled():
            # Callers of `raw` need not check for gradients: such a call is recorded as if it came by `overload`.
            if self.guarded and dispatcher_calls.any_requires_grad(
                *call.args
            ):  # somebody called `raw` who does not ask this
                positional, named = self.spec.split(call.args)
                return self.record(None, *positional, **named)
            if not self.differentiable:  # no formula stands in front: torch would record the operations of the kernel
                with torch.no_grad():
                    return self.serve(call, kernel)
        if kernel is not None:
            outs = kernel.run(call)
        else:
            places = places_of(self.spec, call.args) if self.spec.mutated else []
            outs = check_outputs(self.spec, call, self._run_checked_reference(call.args))
            require_places(f"{self.spec.name}, reference", places)
        return outs[0] if len(outs) == 1 else outs or None

    def _run_checked_reference(self, args: Args) -> Returned:
        """Run the reference. During its first calls, compare its arguments before and after the call."""
        if self.unchanged.left:
            return self.unchanged.during(args, lambda: self.run_reference(args))
        return self.run_reference(args)

    def serve_tangent(self, *args: Value, **kwargs: Value) -> Result:
        """Run the reference of a call under forward-mode differentiation, which no kernel supports."""
        call = self.plan.quick(*self.spec.complete(args, kwargs))
        self._report_reference_runs(str(call.device), "forward-mode AD is the reference's", key="tangent")
        result = with_own_memory(self.run_reference(call.args))
        if self.surrogate is not self.reference:
            positional, named = self.spec.split(call.args)
            result = dispatcher_transforms.with_tangents(result, self.surrogate(*positional, **named))
        return detach_results(self.spec, result)

    def _report_reference_runs(self, device: str, why: str, key: str) -> None:
        """Report once that the reference runs, or raise SL306 under ``SHIPLAP_STRICT=1``."""
        name = self.spec.name
        if settings().strict:
            raise error("SL306", where=name, got=why, expected=f"a kernel for {device}")
        notice(f"{name}/{device}/{key}", f"{name} runs its reference ({why}): correct, not fast")
