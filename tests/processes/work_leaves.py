"""A script that ends well on all processes, but slowly on one of them.

Arguments: where it is slow ("interpreter", after JAX has shut down, or "parting", before the watch has ended), on which process, whether
the processes watch each other.
"""

import atexit
import sys
import time

SLOW_S = 2.0
where, process, watches = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "watched"


def end():
    """Runs last, since it is registered before JAX is imported."""
    print(f"process {here} ends at {time.time():.3f}", flush=True)
    if where == "interpreter" and here == process:
        time.sleep(SLOW_S)


atexit.register(end)

import jax  # noqa: E402  # after the handler that is to run last

from spmdctx import communication  # noqa: E402  # after the handler that is to run last
from spmdctx.communication.meeting.link import Link  # noqa: E402  # after the handler that is to run last

communication.init("gloo", watch=watches)
here = jax.process_index()
if where == "parting" and here == process:
    end_link = Link.end

    def end_slowly(link):
        time.sleep(SLOW_S)
        print(f"process {here} parts at {time.time():.3f}", flush=True)
        end_link(link)

    Link.end = end_slowly
