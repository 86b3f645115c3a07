"""Legs whose workers or detokenizers died are tried apart: whichever of them kills takes nobody
along.
"""

from shared.ids import pack_ids
from shared.messages import Ended, EndedLeg, Run
from tests.services.scheduler.rig import Rig


def test_a_poisonous_leg_waits_for_an_empty_worker_and_holds_up_nobody() -> None:
    """One worker is kept free for it while the others go on."""
    rig = Rig().lead("w0", "w1", "d0")
    rig.beat("w0", load=1)
    rig.beat("w1", load=2)
    rig.submit("poison", epoch=3, alone=True)
    rig.submit("other")
    assert [(to, m.submit.request_id) for to, m in rig.sent(Run)] == [("w1", "other")]
    rig.beat("w0", load=0)
    assert [(to, m.submit.request_id) for to, m in rig.sent(Run)] == [("w0", "poison")]
    rig.submit("third")
    assert [to for to, _ in rig.sent(Run)] == ["w1"]
    rig.say(Ended(worker="w0", legs=[EndedLeg("poison", 0, 3, "stop", 5)]))
    rig.submit("fourth")
    rig.pass_time(0.1)
    assert "w0" not in [to for to, _ in rig.sent(Run)], "its last ids are on their way to be text"
    rig.pass_time(0.2)
    rig.beat("w0")
    rig.sent(Run)
    rig.submit("fifth")
    assert [to for to, _ in rig.sent(Run)] == ["w0"]


def test_a_poisonous_leg_waits_for_those_it_stopped() -> None:
    """All workers died of it: the first one back goes on with the others, the next one is its."""
    rig = Rig().lead("d0")
    rig.submit("poison", epoch=3, alone=True)
    rig.submit("victim", epoch=2)
    rig.submit("new")
    rig.beat("w0")
    assert [m.submit.request_id for _, m in rig.sent(Run)] == ["victim"]
    rig.beat("w0", load=1)
    rig.pass_time(0.3)
    assert rig.sent(Run) == []
    rig.beat("w1")
    assert [(to, m.submit.request_id) for to, m in rig.sent(Run)] == [
        ("w1", "poison"),
        ("w0", "new"),
    ]


def test_suspects_are_tried_one_after_the_other_in_quarantine() -> None:
    """A crash makes suspects of many innocents: they do not wait for one another's whole answers.
    Nobody else is there meanwhile, and when all are tried the worker is like any other.
    """
    rig = Rig().lead("w0", "w1", "d0")
    rig.beat("w0", load=1)
    rig.beat("w1", load=2)
    for name, ids in (("c", 0), ("a", 5), ("b", 2)):  # the fewer ids, the more suspect
        rig.submit(name, epoch=3, alone=True, output_ids=pack_ids(range(ids)))
    rig.submit("new")
    rig.beat("w0")
    rig.submit("victim", epoch=2)
    runs = [(to, m.submit.request_id) for to, m in rig.sent(Run)]
    assert runs == [("w1", "new"), ("w0", "a"), ("w1", "victim")]
    rig.beat("w1", load=2)
    for step, (name, load) in enumerate({"b": 1, "c": 2}.items(), start=1):
        rig.beat("w0", load=load, phase="prefill", step=2 * step - 1, prefill_tokens_waiting=8)
        rig.pass_time(0.3)
        assert rig.sent(Run) == [], "the one on trial has no id yet"
        rig.beat("w0", load=load, phase="decode", step=2 * step)
        assert rig.sent(Run) == [], "its first id is on its way to be text"
        rig.pass_time(0.3)
        rig.beat("w0", load=load, phase="decode", step=2 * step)
        [(to, run)] = rig.sent(Run)
        assert (to, run.submit.request_id, run.submit.alone) == ("w0", name, False)
    rig.submit("other")
    assert [to for to, _ in rig.sent(Run)] == ["w1"]
    rig.beat("w0", load=3, phase="prefill", step=5)
    rig.pass_time(0.3)
    rig.beat("w0", load=2, phase="decode", step=6)
    rig.pass_time(0.3)
    rig.beat("w0", load=2, phase="decode", step=7)
    rig.beat("w1", load=4)
    rig.submit("late")
    assert [to for to, _ in rig.sent(Run)] == ["w0"]
    rig.submit("d", epoch=3, alone=True)
    assert rig.sent(Run) == [], "an ordinary leg is there now"
