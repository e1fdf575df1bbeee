"""``Executor``: the part of an op below autograd and autocast. It binds a call, picks a kernel and runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

from shiplap.declare.binding import Binding
from shiplap.declare.kernel import Kernel
from shiplap.declare.values import Args, Result, Returned, Value
from shiplap.dispatch import tuned_choices
from shiplap.dispatch.autocast import call_outside_region
from shiplap.dispatch.autograd import RecordCall, detach_results
from shiplap.dispatch.check_unchanged import places_of, require_places
from shiplap.dispatch.launch import refuse_capture
from shiplap.dispatch.outputs import check_outputs, with_own_memory
from shiplap.dispatch.state import OpState
from shiplap.errors import ShiplapError, error, notice
from shiplap.settings import is_strict
from shiplap.torch_private import dispatcher_calls, dispatcher_transforms
from shiplap.torch_private.dispatcher_library import Overload


class Executor(OpState):
    """The part of an op that runs calls. Its methods are called by torch's dispatcher, by generated functions and by
    native code.

    Attributes:
        overload: the registered ``torch.ops.<namespace>.<name>.default``.
        below_autograd: its overload ``torch.ops.<namespace>.<name>.raw``, below autograd and autocast. Plain eager
            calls and Inductor's code call it. It is ``overload`` itself if the op has no autograd implementation.
            Modes, tensor subclasses and graphs get ``overload`` instead, so that a graph can be trained however it was
            traced.
        record_call: the implementation that autograd calls. Only an op with its own ``below_autograd`` has it.
        can_skip_dispatcher: whether a call that neither autograd nor autocast has to see may call ``below_autograd``
            directly. This is False for ops with lists of tensors, since a search for gradients in every list would be
            too slow.
    """

    overload: Overload
    below_autograd: Overload
    record_call: RecordCall
    can_skip_dispatcher: bool
    fast_execute: Callable[..., Result] | None = None  # a shorter way than `execute_anew`, see dispatch/fast_paths.py

    def execute(self, *args: Value, **kwargs: Value) -> Result:
        """Return the result of a call of the op below autograd, with autocast switched off. Check the arguments, pick a
        kernel and run it. torch calls this implementation.

        If autocast was on, it would convert the operands of operators inside kernels. It would do so also for ops
        without a rule, and for tensors on other devices than those of the arguments.
        """
        if dispatcher_calls.any_autocast():
            return call_outside_region(self.execute, args, kwargs)
        if dispatcher_calls.lacks_eager_keys():
            result: Result = dispatcher_calls.call_with_eager_keys(self.execute, args, kwargs)
            return result
        if (
            self.fast_execute is None
            or kwargs
            or (torch.is_grad_enabled() and dispatcher_calls.any_requires_grad(*args))
        ):
            return self.execute_anew(*args, **kwargs)
        return self.fast_execute(*args)

    def execute_anew(self, *args: Value, **kwargs: Value) -> Result:
        """Return the result of a call of the op after all checks of its arguments and a new choice of kernel. The fast
        path, which repeats earlier calls, is not used.
        """
        given = self.spec.complete(args, kwargs) if kwargs else args
        call = self.plan.quick(*given)
        return self.run_bound_call(call, self.pick_kernel(call))

    def refusal(self, cause: Exception) -> ShiplapError | None:
        """Return the catalogue error of native code behind ``cause``, an exception that lost its Python class in C++.
        Return None if native code of this op did not raise it.
        """
        return self.entrance.refusal(cause) if self.entrance is not None else None

    def refuse_vmap(self, *args: Value, **kwargs: Value) -> NoReturn:
        """Raise ``SL317``, since ``op.out`` was called under ``torch.vmap``."""
        got = "a call of op.out under torch.vmap"
        raise error("SL317", where=self.spec.name, got=got, expected="a call that returns new tensors")

    def pick_kernel(self, call: Binding) -> Kernel | None:
        """Return the kernel that runs ``call``, whose arguments are checked. It is the tuned choice, or else the first
        kernel that accepts the call. Return None if the reference has to run. In that case, issue a notice unless the
        op declares the reference as fast on the device.
        """
        # The sizes of such results are read on the host, which a capture cannot record.
        if self.spec.dynamic:
            refuse_capture(self.spec, call.device)
        if tuned_choices.active and not isinstance(
            choice := tuned_choices.find_choice(self, call), tuned_choices.MissingChoice
        ):
            return choice
        device, reasons = call.device.type, []
        for kernel in self.eager_kernels(device):
            if not isinstance(serving := kernel.variant_for_call(call), str):
                return serving
            reasons.append(f"{kernel.name}: {serving}")
        if device not in self.spec.reference_is_fast_on:
            names = [k.name for k in self.kernels.get(device, ())]  # the reason may hold sizes: it is no key
            others = f", only for {' and '.join(self.kernels)}" if self.kernels else ""
            self._report_reference_runs(device, "; ".join(reasons) or f"no kernel for {device}{others}", key=str(names))
        return None

    def run_bound_call(self, call: Binding, kernel: Kernel | None) -> Result:
        """Run ``call``, whose arguments are checked, by ``kernel``, or by the reference if ``kernel`` is None. Return
        the only output itself, several outputs as a tuple, or None if there are none. Autograd records the call if an
        argument requires a gradient.
        """
        if torch.is_grad_enabled():
            # Callers of `raw` need not check for gradients: such a call is recorded as if it came by `overload`.
            if self.needs_autograd and dispatcher_calls.any_requires_grad(
                *call.args
            ):  # somebody called `raw` who does not ask this
                positional, named = self.spec.split(call.args)
                return self.record_call(None, *positional, **named)
            if not self.differentiable:  # no formula stands in front: torch would record the operations of the kernel
                with torch.no_grad():
                    return self.run_bound_call(call, kernel)
        if kernel is not None:
            outs = kernel.run_call(call)
        else:
            places = places_of(self.spec, call.args) if self.spec.mutated else []
            outs = check_outputs(self.spec, call, self._run_checked_reference(call.args))
            require_places(f"{self.spec.name}, reference", places)
        return outs[0] if len(outs) == 1 else outs or None

    def _run_checked_reference(self, args: Args) -> Returned:
        """Return the result of the reference. Raise ``SL316`` if one of its first calls writes to an argument that it
        must not change. Later calls are not checked.
        """
        if self.unchanged.left:
            return self.unchanged.during(args, lambda: self.run_reference(args))
        return self.run_reference(args)

    def serve_tangent(self, *args: Value, **kwargs: Value) -> Result:
        """Return the result of a call under forward-mode differentiation. The reference computes it, since no kernel
        supports tangents. If the op declares a surrogate, the tangents are those of the surrogate.
        """
        call = self.plan.quick(*self.spec.complete(args, kwargs))
        self._report_reference_runs(str(call.device), "forward-mode AD is the reference's", key="tangent")
        # An op returns fresh memory, while a reference may return views of its arguments.
        result = with_own_memory(self.run_reference(call.args))
        # The values are the reference's, the tangents those of the function that the gradient belongs to.
        if self.surrogate is not self.reference:
            result = dispatcher_transforms.with_tangents(result, self.run_surrogate(call.args))
        return detach_results(self.spec, result)

    def _report_reference_runs(self, device: str, why: str, key: str) -> None:
        """Issue a notice that the reference runs in place of a kernel on ``device``, once for each ``key``. In strict
        mode, raise ``SL306`` instead. ``why`` is the reason in words.
        """
        name = self.spec.name
        if is_strict():
            raise error("SL306", where=name, got=why, expected=f"a kernel for {device}")
        notice(f"{name}/{device}/{key}", f"{name} runs its reference ({why}): correct, not fast")
