"""A script that processes of all roles run, as MindSpore's do."""

import sys

import spmdctx
from benchmarks import ps_work


def made():
    spmdctx.set_ps_context(enable_ps=True, folder=FOLDER)
    return ps_work.made()


if __name__ == "__main__":
    FOLDER = sys.argv.pop()
    ps_work.main(made)
