"""The audit of every op that the network of the demonstration uses."""

from __future__ import annotations

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor

import shiplap as sl
import shiplap_sparse3d as sparse3d
from shiplap_sparse3d.demo.result import AuditVerdicts
from shiplap_sparse3d.demo.train import Progress

__all__ = ["audit_network_ops"]

QUICK_CHECKS = ("schema", "fake", "numerics", "fresh", "gradient")  # a second or less each
SECONDS, QUICK_SECONDS = 16.0, 4.0  # for an op, on average
# Ops with quick samples come first, since later ones get the time that they leave.
OPS: tuple[sl.Op, ...] = (
    sparse3d.segment_mean,
    sparse3d.transpose_table,
    sparse3d.unique_coords,
    sparse3d.conv_table,
    sparse3d.out_coords,
    sparse3d.subm_table,
    sparse3d.conv_weight_grad,
    sparse3d.conv,
)


def audit_network_ops(quick: bool, progress: Progress) -> dict[str, AuditVerdicts]:
    """Audit each op of the demonstration's network on the CPU. Return, by the name of the op, how many checks ended
    with each verdict. If ``quick`` is true, only the checks ``QUICK_CHECKS`` run, and an op gets ``QUICK_SECONDS``.
    Otherwise all checks run, and an op gets ``SECONDS``. Time that an op leaves is shared by the later ones.
    ``progress`` is called before each op and at the end.
    """
    # Threads suffice: samples run in a process of their own, for which a thread waits.
    workers = min(2, len(os.sched_getaffinity(0)))
    end = time.monotonic() + (QUICK_SECONDS if quick else SECONDS) * math.ceil(len(OPS) / workers)

    def audit_op(place: int) -> AuditVerdicts:
        """Audit the op at ``place`` of ``OPS``, and return the numbers of its verdicts."""
        rounds = math.ceil((len(OPS) - place) / workers)
        seconds = max(1.0, (end - time.monotonic()) / rounds)
        report = sl.audit(OPS[place], checks=QUICK_CHECKS if quick else None, seed=0, budget=seconds)
        count = [f.verdict for f in report].count
        return AuditVerdicts(count("ok"), count("fail"), count("skip"), report.failed, count("incomplete"))

    verdicts: dict[str, AuditVerdicts] = {}
    pool = ThreadPoolExecutor(workers)
    try:
        found = pool.map(audit_op, range(len(OPS)))
        for done, op in enumerate(OPS):
            progress("audit", done, len(OPS), op.spec.name)
            verdicts[op.spec.name] = next(found)
    finally:
        pool.shutdown(cancel_futures=True)
    progress("audit", len(OPS), len(OPS), "")
    return verdicts
