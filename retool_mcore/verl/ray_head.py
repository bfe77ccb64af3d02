"""The process that holds a run's own Ray; its argument is those of ``ray.init``, in JSON.

It writes the cluster's address when there is one. SIGTERM then ends Ray's processes, and it.
"""

import json
import signal
import sys

from retool_mcore.process import die_with_parent, exit_on_sigterm

if __name__ == "__main__":
    die_with_parent()
    import ray

    ray.init(address="local", log_to_driver=False, **json.loads(sys.argv[1]))
    exit_on_sigterm()  # Ray's own handler writes a stack; its exit handler ends what it has started
    sys.stdout.write(f"{ray.get_runtime_context().gcs_address}\n")
    sys.stdout.flush()
    while True:
        signal.pause()
