"""The audit of every op that the network of the demonstration uses."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import shiplap as sl
import shiplap_sparse3d as sparse3d
from shiplap_sparse3d.demo.result import AuditVerdicts
from shiplap_sparse3d.demo.train import Progress

__all__ = ["audit_network_ops"]

QUICK_CHECKS = ("schema", "fake", "numerics", "fresh", "gradient")  # a second or less each
OPS: tuple[sl.Op, ...] = (
    sparse3d.conv,
    sparse3d.conv_weight_grad,
    sparse3d.subm_table,
    sparse3d.out_coords,
    sparse3d.conv_table,
    sparse3d.transpose_table,
    sparse3d.unique_coords,
    sparse3d.segment_mean,
)


def audit_network_ops(quick: bool, progress: Progress) -> dict[str, AuditVerdicts]:
    """Audit each op of the demonstration's network on the CPU. Return, by the name of the op, how many checks ended
    with each verdict. If ``quick`` is true, only the checks ``QUICK_CHECKS`` run, with a budget of 2 seconds an op.
    Otherwise all checks run, with a budget of 20 seconds an op. ``progress`` is called before each op and at the end.
    """
    verdicts: dict[str, AuditVerdicts] = {}
    # Threads suffice: samples run in a process of their own, for which a thread waits.
    pool = ThreadPoolExecutor(min(2, len(os.sched_getaffinity(0))))
    try:
        found = pool.map(partial(_audit_op, quick), OPS)
        for done, op in enumerate(OPS):
            progress("audit", done, len(OPS), op.spec.name)
            verdicts[op.spec.name] = next(found)
    finally:
        pool.shutdown(cancel_futures=True)
    progress("audit", len(OPS), len(OPS), "")
    return verdicts


def _audit_op(quick: bool, op: sl.Op) -> AuditVerdicts:
    """Audit ``op``, and return the numbers of its verdicts. If ``quick`` is true, the audit makes only ``QUICK_CHECKS``
    and ends after 4 s. Otherwise it makes all checks and ends after 20 s.
    """
    report = sl.audit(op, checks=QUICK_CHECKS if quick else None, seed=0, budget=4 if quick else 20)
    count = [f.verdict for f in report].count
    return AuditVerdicts(count("ok"), count("fail"), count("skip"), report.failed, count("incomplete"))
