"""The plan of a step on servers: what each holds and what passes, against bytes counted by hand."""

import optax

from tests.server import cases

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def plan_of(num_servers=2, num_parts=3):
    state = cases.state_of(TX)
    return cases.served(cases.step_of(TX), num_servers, num_parts).plan(state, cases.batch())


def test_servers_share_the_state_with_what_belongs_to_each_parameter():
    plan = plan_of()
    for one in plan.servers:
        names = {path.rpartition("/")[2] for path in one.arrays if "/mu/" in path and "scale" not in path}
        assert names == {path.rpartition("/")[2] for path in one.arrays if path.startswith("state/0/") and "scale" not in path}
    held = [path for one in plan.servers for path in one.arrays if not path.endswith(("scale", "count"))]
    assert len(held) == len(set(held)) == 3 * 4


def test_bytes_are_those_of_gradients_parameters_and_norms():
    plan = plan_of()
    elements = 8 * 16 + 16 * 16 + 16 * 4 + 4
    scalars = 1 + 1  # the scale and the loss, for which both servers wait
    pushed = sum(one.pushed_bytes for one in plan.servers)
    assert 3 * 4 * elements < pushed <= 3 * 4 * (elements + 2 * scalars)
    pulled = sum(one.pulled_bytes for one in plan.servers)
    assert pulled == 4 * (elements + 1)
    assert all(0 < one.exchanged_bytes < 100 for one in plan.servers)


def test_the_table_and_its_data_say_the_same():
    plan = plan_of()
    text, data = str(plan), plan.to_dict()
    assert "2 servers, 3 parts on 1 worker" in text
    assert "A worker's part" in text
    assert [row["num_bytes"] for row in data["servers"]] == [one.num_bytes for one in plan.servers]
    assert data["step_s"] > 3 * plan.cost.total_s
    assert "2 servers" in plan._repr_html_()


def test_one_server_exchanges_nothing():
    (only,) = plan_of(num_servers=1).servers
    assert only.exchanged_bytes == 0


def test_the_program_of_a_part_agrees_with_its_plan():
    state = cases.state_of(TX)
    assert cases.served(cases.step_of(TX), 2, 3).audit(state, cases.batch()).ok
