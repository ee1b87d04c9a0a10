"""The processes on the GPUs, judged by the leases that they belong to, and the facts for it that outlive mpsd."""
