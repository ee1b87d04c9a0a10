"""NVIDIA's interface as values: commands, limits, flags, answers and log lines.

Imported by: core/admission, core/doctor, core/enforcement, core/metrics, daemon/canary, daemon/control, daemon/ends,
    daemon/leases, kubernetes, simulator, system, system/doctor.
"""
