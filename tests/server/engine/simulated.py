"""A whole job in one event loop, whose clock runs only when nothing else does: the real scheduler and servers, without an engine."""

import asyncio
import itertools
import random
from types import SimpleNamespace
from typing import NamedTuple

from spmdctx.server.engine import attendance, fleet, scheduler, server, spares
from spmdctx.server.engine.fleet import Job, Layout
from spmdctx.server.engine.messages import Word
from spmdctx.server.engine.scheduler import Scheduler
from spmdctx.server.state.presence import BEAT_S, Presence
from spmdctx.server.state.progress import Done, Failed, Go, Leave, Replay, Setup

KEYS, STEPS, PARTS = 6, 14, 3
LIMIT_S = 2000.0


class RayError(Exception):
    """The root, as in Ray."""


class RayTaskError(RayError):
    """An actor's method has failed."""


class RayActorError(RayError):
    """A process was lost."""


class Spec(NamedTuple):
    server: int
    num_servers: int


class Loop(asyncio.SelectorEventLoop):
    """An event loop that does not wait: its clock jumps to the next timer."""

    def __init__(self):
        super().__init__()
        self._now = 0.0
        select = self._selector.select

        def jump(timeout=None):
            assert timeout is not None, "nothing will ever happen again"
            self._now += max(timeout, 0)
            return select(0)

        self._selector.select = jump

    def time(self):
        return self._now


class Model:
    """A shard whose arrays are the updates that they have had, key by key."""

    tables = ()

    def __init__(self, job, spec, version, values):
        self.job, self.spec, self.version = job, spec, version
        self.values, self.results = values, {}
        self.before, self.waiting = None, {}

    def add(self, step, part, values):
        if step == self.version:
            self.waiting[part] = (step, part)
        return step == self.version and len(self.waiting) == PARTS

    def take(self, tasks):
        self.before = self.values
        self.values = {key: (*own, *tasks) for key, own in self.values.items()}
        self.version += 1
        self.results = {0: tasks[-1]}

    def renew(self, exchange):
        tasks, self.waiting = [self.waiting[part] for part in range(PARTS)], {}
        self.take(tasks)

    def update(self, values):
        self.take([values["task"]])

    def pull(self, slots, version=None):
        if version in (None, self.version):
            return self.version, [self.values]
        return (version, [self.before]) if version == self.version - 1 and self.before is not None else None

    def saved(self):
        return self.values


class Actor:
    """What Ray gives for a server: its process is lost and started again, and calls to it come late."""

    def __init__(self, job, name):
        self.job, self.name, self.running, self.is_over = job, name, set(), False
        self.object, self.was = None, False
        self.restart(job.random.uniform(0.5, 3))

    def restart(self, seconds):
        async def start():
            await asyncio.sleep(seconds)
            if not self.is_over:
                self.object, self.was = server.Server(self.name), True

        self.starting = self.job.task(start())

    def lose(self):
        """Loses the process; returns what it held, by key."""
        found, self.object = self.object, None
        for task in [*self.running, *(found._tasks if found is not None else ())]:
            task.cancel()
        return {} if found is None or found._shard is None else dict(found._shard.values)

    def __getattr__(self, method):
        return Method(self, method)


class Method:
    """A method of an actor, as it is called from elsewhere."""

    def __init__(self, actor, name, retries=0):
        self.actor, self.name, self.retries = actor, name, retries

    def options(self, max_task_retries=0):
        return Method(self.actor, self.name, max_task_retries)

    def remote(self, *arguments, **options):
        return self.actor.job.task(self.run(arguments, options))

    async def run(self, arguments, options):
        actor = self.actor
        while True:
            await actor.job.delay()
            if actor.object is None and (actor.is_over or not self.retries):
                raise RayActorError(self.name)
            if actor.object is None:
                await asyncio.sleep(0.2)
                continue
            call = asyncio.ensure_future(getattr(actor.object, self.name)(*arguments, **options))
            actor.running.add(call)
            try:
                found = await call
            except asyncio.CancelledError:
                if not call.cancelled():
                    raise  # it is this one that is cancelled
                if not self.retries:
                    raise RayActorError(self.name) from None
                continue
            except Exception as error:
                raise RayTaskError(self.name) from error
            finally:
                actor.running.discard(call)
            await actor.job.delay()
            return found


class Simulated:
    """A job whose workers and servers are lost, and which is scaled, at random.

    Attributes:
        lost: by key, the updates that a loss may have taken.
        floors: at each loss of a server, the newest version that was saved before, and the one with which the server went on.
    """

    def __init__(self, seed, mode, bound, folder, *, troubles=12, num_workers=4):
        self.random, self.mode, self.bound, self.folder = random.Random(seed), mode, bound, folder
        self.troubles, self.num_workers = troubles, num_workers
        self.files, self.complete, self.under_way = {}, {}, {}
        self.lost = {key: set() for key in range(KEYS)}
        self.loads = []
        self.tasks, self.workers = set(), {}
        self.lives = map(str, itertools.count())

    def task(self, work):
        found = asyncio.ensure_future(work)
        self.tasks.add(found)
        found.add_done_callback(lambda task: task.cancelled() or task.exception())
        found.add_done_callback(self.tasks.discard)
        return found

    async def delay(self):
        await asyncio.sleep(self.random.expovariate(100) + (self.random.random() < 0.1) * self.random.random())

    def patch(self, monkeypatch):
        """Has the scheduler and servers run here."""
        own = SimpleNamespace(
            exceptions=SimpleNamespace(RayError=RayError, RayActorError=RayActorError, RayTaskError=RayTaskError),
            cluster_resources=dict,
            remote=lambda _: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda name: Actor(self, name))),
            kill=self.kill,
        )
        for module in (fleet, spares, server, scheduler):
            monkeypatch.setattr(module, "ray", lambda: own)
        monkeypatch.setattr(server, "join_job", lambda _: (self.handle, next(self.lives)))
        monkeypatch.setattr(server, "_loaded", self.loaded)
        monkeypatch.setattr(server, "_saved", self.saved)
        monkeypatch.setattr(scheduler, "complete", self.completed)
        monkeypatch.setattr(attendance, "Presence", lambda: Presence(lambda: asyncio.get_running_loop().time()))
        monkeypatch.setattr(asyncio, "to_thread", self.inline)

    async def inline(self, fn, *arguments):
        await self.delay()
        return fn(*arguments)

    def kill(self, actor):
        actor.is_over = True
        actor.lose()

    def loaded(self, order, former):
        held = self.complete[order.version]
        own = {key: held[key] for key in range(KEYS) if key % order.spec.num_servers == order.spec.server}
        self.loads.append(order.version)
        return Model(self, order.spec, order.version, own)

    def saved(self, order, shard, version, values):
        self.files.setdefault(version, {}).update(values)
        return f"server-{order.spec.server}"

    def completed(self, folder, state, results):
        if state.version:
            found = dict(self.files[state.version])
            assert len(found) == KEYS
            self.complete[state.version] = found
            if self.troubles and self.random.random() < 0.4:
                self.task(self.lose_soon())  # while messages of before are on their way
            known = self.scheduler._progress
            done = () if state.updates is None else state.updates.done
            self.under_way[state.version] = {task for task in done if task not in known.done and task[0] >= known.floor}

    async def run(self):
        """Runs the job to its end; returns what servers hold, by key."""
        self.partly = {key: set() for key in range(KEYS)}
        self.complete[0] = dict.fromkeys(range(KEYS), ())
        self.scheduler = Scheduler(Job(self.random.randint(1, 3), self.mode, self.bound, 2, str(self.folder)))
        self.handle = Actor.__new__(Actor)
        self.handle.__dict__.update(job=self, object=self.scheduler, running=set(), is_over=False)
        for number in range(self.num_workers):
            self.start(number)
        trouble = self.task(self.trouble())
        while self.workers:
            await asyncio.wait([*self.workers.values()], return_when=asyncio.FIRST_COMPLETED, timeout=1)
            for number, task in list(self.workers.items()):
                if task.done():
                    del self.workers[number]
                    task.result()
                    await self.scheduler.lost(number)
            assert not self.scheduler._progress.failure, self.scheduler._progress.failure
            assert asyncio.get_running_loop().time() < LIMIT_S, f"the job hangs: {self.scheduler._progress}"
        trouble.cancel()
        held = {}
        for actor in self.scheduler._fleet.servers:
            while actor.object is None or actor.object._shard is None or actor.object._order is None:
                await asyncio.sleep(1)
            held.update(actor.object._shard.values)
        return held

    def start(self, number):
        self.workers[number] = self.task(self.worker(number, next(self.lives)))

    async def trouble(self):
        kinds = [self.lose_worker, self.lose_server, self.lose_server, self.scale, self.fit_workers]
        for _ in range(self.troubles):
            await asyncio.sleep(self.random.expovariate(2))
            await self.random.choice(kinds)()

    async def lose_worker(self):
        if self.workers:
            number = self.random.choice(list(self.workers))
            self.workers[number].cancel()
            delay = self.random.uniform(0.5, 5)

            async def again():
                await asyncio.sleep(delay)
                await self.worker(number, next(self.lives))

            self.workers[number] = self.task(again())

    async def lose_soon(self):
        await asyncio.sleep(self.random.expovariate(50))
        await self.lose_server()

    async def lose_server(self):
        actors = self.scheduler._fleet.servers
        actors = [actor for actor in actors if actor.object is not None]
        if actors:
            actor = self.random.choice(actors)
            for key, own in actor.lose().items():
                # What it has had since the newest state is lost.
                self.lost[key].update(set(own) - set(self.complete[self.scheduler._common][key]))
            actor.restart(self.random.uniform(0.5, 4))

    async def scale(self):
        await self.scheduler.scale(self.random.randint(1, 4))

    async def fit_workers(self):
        if self.random.random() < 0.5 and len(self.workers) > 1:
            await self.scheduler.remove_worker(max(self.workers))
        elif self.workers:
            self.start(max(self.workers) + 1)

    async def worker(self, number, life):
        """Does what a worker does."""
        own, kept = self.scheduler, set()
        await self.ask(own.begin(number, life))
        beat = self.task(self.beat(number, life))
        try:
            await asyncio.sleep(self.random.uniform(0, 1))
            await self.ask(own.hello(number, "step", PARTS))
            for step in range(STEPS):
                kept.add(step)
                answer = await self.until_done(number, life, step, kept)
                if answer is None:
                    return
                kept = {one for one in kept if one >= answer.kept_from}
        finally:
            beat.cancel()

    def ask(self, call):
        """What a worker waits for, and what goes on if the worker is lost."""
        return asyncio.shield(self.task(call))

    async def beat(self, number, life):
        while True:
            await asyncio.sleep(BEAT_S)
            await self.scheduler.beat(number, life)

    async def until_done(self, number, life, step, kept):
        at, known, servers = step, None, []
        while True:
            await self.delay()
            answer = await self.ask(self.scheduler.ask(number, at, life))
            reply = answer.reply
            assert not isinstance(reply, Failed), reply
            if isinstance(reply, Leave):
                return None
            if isinstance(reply, Setup):
                for key, own in self.complete[reply.version or 0].items():
                    # Where servers become others, an update counts as done that only some have had, of a worker that was lost.
                    self.partly[key].update(self.under_way.get(reply.version, set()) - set(own))
                specs = [Spec(server, reply.num_servers) for server in range(reply.num_servers)]
                await self.ask(self.scheduler.set_up(Layout(specs, PARTS, "step", reply.version or 0)))
            elif isinstance(reply, Replay):
                assert reply.version in kept, f"step {reply.version} is not kept"
                at = reply.version
            elif isinstance(reply, Done):
                if at == step:
                    assert reply.results, "the results of a step are not kept"
                    return answer
                at += 1
            elif isinstance(reply, Go):
                if known != (reply.generation, answer.edition):
                    *known, servers = await self.ask(self.scheduler.servers())
                    known, servers = tuple(known), list(servers)
                    if known != (reply.generation, answer.edition):
                        continue
                try:
                    await self.compute(reply, at, servers, answer.edition)
                except (RayActorError, LookupError):
                    known = None
                    await asyncio.sleep(0.05)

    async def compute(self, go, step, servers, edition):
        version = go.version if self.mode == "sync" else 0
        pulled = await self.ask(asyncio.gather(*(server.pull.remote(go.generation, version, ["x"]) for server in servers)))
        if None in pulled:
            raise LookupError
        await asyncio.sleep(self.random.expovariate(20))
        pushes = [
            server.push.remote(go.generation, step, part, {"task": (step, part)}, own.version)
            for part in go.parts
            for server, own in zip(servers, pulled, strict=True)
        ]
        found = await self.ask(asyncio.gather(*pushes))
        if None in found:
            raise LookupError
        results = {number: value for one in found for number, value in one.results.items()}
        word = Word(go.generation, edition, step, list(go.parts), results, max(one.late for one in found), 0)
        self.task(self.told(word))

    async def told(self, word):
        await self.delay()
        await self.scheduler.pushed(word)


def simulated(seed, mode, bound, folder, monkeypatch, **options):
    """Runs a job; returns it, and what servers hold at its end."""
    job = Simulated(seed, mode, bound, folder, **options)
    loop = Loop()
    with monkeypatch.context() as patch:
        job.patch(patch)
        try:
            held = loop.run_until_complete(job.run())
        finally:
            while left := asyncio.all_tasks(loop):
                for task in left:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(left, timeout=1))
            loop.close()
    return job, held
