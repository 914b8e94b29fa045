"""Stop strings across pieces: against the same question asked of the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.http.stop_strings import StopFinder

LETTERS = st.text("ab\u00e9", max_size=12)


def run(pieces: list[str], stops: list[str]) -> tuple[str, StopFinder]:
    finder = StopFinder(stops)
    shown = "".join(finder.push(piece) for piece in pieces)
    if not finder.is_stopped:
        shown += finder.finish()
    return shown, finder


@given(st.lists(LETTERS), st.lists(st.text("ab\u00e9", min_size=1, max_size=4), max_size=4))
def test_shows_what_comes_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    shown, finder = run(pieces, stops)
    # Which stop is complete first, as the text grows character by character, decides.
    whole = ""
    for character in "".join(pieces):
        whole += character
        ended = [stop for stop in stops if whole.endswith(stop)]
        if ended:
            break
    else:
        assert not finder.is_stopped
        assert shown == "".join(pieces)
        return
    assert finder.is_stopped
    assert "".join(pieces).startswith(shown)
    places = [place for stop in stops if (place := "".join(pieces).find(stop)) >= 0]
    assert len(shown) in places


def test_pieces_character_by_character_are_the_first_complete_stop() -> None:
    shown, finder = run(list("one two\n\nthree"), ["\n\n", "three"])
    assert (shown, finder.is_stopped) == ("one two", True)


def test_the_beginning_of_a_stop_is_held_back_and_given_out_when_it_is_none() -> None:
    finder = StopFinder(["END"])
    assert [finder.push(piece) for piece in ("a E", "N", "x E")] == ["a ", "", "ENx "]
    assert finder.finish() == "E"


def test_the_rest_after_a_stop_is_known() -> None:
    finder = StopFinder(["<call>"])
    assert finder.push("hello<ca") == "hello"
    assert finder.push("ll>{1}") == ""
    assert finder.rest == "{1}"
    assert finder.push("more") == ""


def test_without_stops_nothing_is_held() -> None:
    finder = StopFinder([])
    assert finder.push("<ca") == "<ca"
    assert finder.finish() == ""
