"""A job in which one parameter is marked, and the others stay with workers."""

import spmdctx
from benchmarks import ps_work

MARKS = ("*/w1", "*/nothing")


def made():
    spmdctx.set_ps_context(enable_ps=True)
    spmdctx.set_param_ps(MARKS)
    return ps_work.made()


if __name__ == "__main__":
    ps_work.main(made)
