"""Progress under random losses: each part counts once in each step, whoever does it, and nobody waits for ever."""

import random

import pytest

from spmdctx.server.state.progress import Done, Failed, Go, Leave, Progress, Replay, Setup

STEPS, SAVE_EVERY = 12, 3


class Servers:
    """Models of servers: they hold what was applied, as (step, part) in order, and what is saved."""

    def __init__(self, count, parts):
        self.count, self.parts = count, parts
        self.applied = [[] for _ in range(count)]
        self.version = [0] * count
        self.waiting = [{} for _ in range(count)]

    def push(self, server, step, part):
        if step == self.version[server]:
            self.waiting[server].setdefault(part, (step, part))

    def renew(self, server):
        if len(self.waiting[server]) < self.parts:
            return False
        self.applied[server] += [self.waiting[server][part] for part in range(self.parts)]
        self.waiting[server] = {}
        self.version[server] += 1
        return True

    def load(self, version):
        for server in range(self.count):
            self.applied[server] = [(step, part) for step in range(version) for part in range(self.parts)]
            self.version[server], self.waiting[server] = version, {}


class Chaos:
    """A job of which everything happens in a random order, one message at a time, and some messages come late or never."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.progress = Progress(self.random.randint(1, 3))
        self.parts = self.random.randint(1, 5)
        self.servers = Servers(self.progress.num_servers, self.parts)
        self.at = dict.fromkeys(range(self.random.randint(1, 4)), 0)
        self.replayed = {}
        self.mail = []
        self.common = 0
        self.losses = 12
        for worker in self.at:
            self.progress.hello(worker)

    def run(self):
        for _ in range(20_000):
            if all(step == STEPS for step in self.at.values()):
                return
            if self.random.random() < 0.02 and self.losses:
                self.losses -= 1
                self.random.choice([self.lose_worker, self.lose_server, self.scale, self.add_worker, self.forget])()
            elif self.mail and self.random.random() < 0.5:
                self.mail.pop(self.random.randrange(len(self.mail)))()
            elif not any([self.renew()]):
                self.work(self.random.choice(sorted(self.at)))
        raise AssertionError(f"no end: {self.progress}")

    def renew(self):
        server = self.random.randrange(self.servers.count)
        if not self.servers.renew(server):
            return False
        generation, version = self.progress.generation, self.servers.version[server]
        self.mail.append(lambda: self.applied(server, generation, version))
        return True

    def applied(self, server, generation, version):
        if self.progress.applied(server, generation, version, {0: version}) and version % SAVE_EVERY == 0:
            self.common = version

    def work(self, worker):
        script = self.at[worker]
        if script == STEPS:
            return
        step = self.replayed.get(worker, script)
        reply = self.progress.ask(worker, step)
        assert not isinstance(reply, Failed | Leave)
        if isinstance(reply, Setup):
            self.servers = Servers(reply.num_servers, self.parts)
            self.servers.load(reply.version or 0)
            self.progress.start(reply.version or 0, reply.num_servers, self.parts)
        elif isinstance(reply, Replay):
            assert reply.version >= self.common
            self.replayed[worker] = reply.version
        elif isinstance(reply, Done):
            assert reply.results == {0: step + 1}
            if step == script:
                self.at[worker] += 1
                self.replayed.pop(worker, None)
            else:
                self.replayed[worker] = step + 1
        elif isinstance(reply, Go):
            self.push(reply, step)

    def push(self, go, step):
        assert go.version == step
        for part in go.parts:
            for server in range(self.servers.count):
                if self.random.random() < 0.97 or self.servers.count == 1:
                    self.servers.push(server, step, part)
                else:
                    return  # killed on the way, and asks again
        late = self.random.random() < 0.3

        def told():
            return self.progress.pushed(go.generation, step, go.parts)

        self.mail.append(told) if late else told()

    def lose_worker(self):
        worker = self.random.choice(sorted(self.at))
        if self.at[worker] < STEPS or self.random.random() < 0.5:
            self.at[worker] = 0
            self.replayed.pop(worker, None)
            self.progress.hello(worker)

    def forget(self):
        """A worker falls silent for a moment: others may take its parts, and it comes again."""
        self.progress.lost(self.random.choice(sorted(self.at)))

    def lose_server(self):
        if self.progress.ready:
            self.progress.rewind(self.common)
            self.servers.load(self.common)

    def scale(self):
        versions = set(self.servers.version)
        if self.progress.ready and versions == {self.progress.version}:
            self.common = self.progress.version
            self.progress.end_layout(self.random.randint(1, 4), self.common)

    def add_worker(self):
        worker = len(self.at)
        self.at[worker] = 0
        self.progress.hello(worker)


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_each_part_counts_once_in_each_step(first):
    for seed in range(first, first + 100):
        job = Chaos(seed)
        job.run()
        everything = [(step, part) for step in range(STEPS) for part in range(job.parts)]
        assert job.servers.applied == [everything] * job.servers.count, seed


def test_word_of_a_step_that_is_over_takes_no_part_of_the_next():
    progress = Progress(1)
    progress.start(0, 1, 2)
    progress.hello(0)
    go = progress.ask(0, 0)
    assert progress.applied(0, go.generation, 1, {})
    progress.pushed(go.generation, 0, go.parts)
    assert progress.ask(0, 1).parts == (0, 1)


def test_parts_of_a_lost_worker_go_to_the_others():
    progress = Progress(1)
    progress.start(0, 1, 3)
    for worker in range(3):
        progress.hello(worker)
    first, second = progress.ask(0, 0), progress.ask(1, 0)
    progress.pushed(first.generation, 0, first.parts)
    assert progress.ask(2, 0).parts == (2,)
    assert progress.ask(0, 0) is None
    progress.lost(1)
    assert progress.ask(0, 0).parts == second.parts
