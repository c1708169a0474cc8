"""Names of arms, as they are written on a command line."""

import pytest

from outrider.bench.arm import main_arm, parse_arm, parse_arms
from outrider.errors import ConfigError


def test_names() -> None:
    plain, off, auto, fixed = parse_arms(("plain", "off", "auto", "fixed3"))
    assert (plain.with_drafter, plain.drafts) == (False, False)
    assert (off.with_drafter, off.drafts) == (True, False)
    assert off.speculation == auto.speculation, "the same engine, whose requests want no drafts"
    assert (auto.with_drafter, auto.drafts, auto.must_draft) == (True, True, False)
    assert (fixed.name, fixed.speculation, fixed.drafts, fixed.must_draft) == ("fixed3", 3, True, True)


def test_the_arm_of_older_command_lines() -> None:
    assert parse_arm("spec").speculation == parse_arm("auto").speculation
    fixed = parse_arm("spec", spec=5)
    assert (fixed.name, fixed.speculation, fixed.must_draft) == ("spec", 5, True)


@pytest.mark.parametrize(
    ("names", "spec", "words"),
    [
        (("plain", "fast"), "auto", "arm 'fast' is unknown"),
        (("fixed",), "auto", "arm 'fixed' is unknown"),
        (("fixed0",), "auto", "arm 'fixed0' is unknown"),
        (("plain", "plain"), "auto", "each once"),
        (("auto", "adaptive"), "auto", "arm 'adaptive' is unknown"),
        ((), "auto", "at least one"),
        (("spec",), "off", "without drafts"),
        (("spec",), 0, "without drafts"),
        (("spec",), "quick", "'quick' is unknown"),
    ],
)
def test_wrong_names_are_refused(names: tuple[str, ...], spec: str | int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_arms(names, spec=spec)


def test_the_main_arm_is_auto_over_plain() -> None:
    assert main_arm(["plain", "fixed7", "auto"]) == "auto"
    assert main_arm(["spec", "plain"]) == "spec"
    assert main_arm(["plain", "fixed7"]) is None
    assert main_arm(["auto"]) is None
