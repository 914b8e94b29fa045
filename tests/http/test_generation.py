"""From the engine's words to pieces, without a pipeline: silence, stops, ends and their counts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest

from orchestrator.http.errors import ApiError
from orchestrator.http.generation import Choice, Generation
from orchestrator.http.metrics import ServerMetrics
from orchestrator.http.stop_strings import StopFinder
from protocol.messages import Finished, Generated, RequestStats, SamplingParams
from tests.http.engines import StillEngine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from orchestrator.http.generation import Piece
    from protocol.messages import FinishReason


class Scene:
    """One generation on an engine that says what the test says."""

    def __init__(self, num_choices: int = 1, stops: tuple[str, ...] = ()) -> None:
        self.engine = cast("Any", StillEngine())
        self.engine.load()
        self.metrics = ServerMetrics("demo")
        self.num_ends = 0
        self.choices = [
            Choice(index, [1, 2], 50, SamplingParams(), False, StopFinder(list(stops)))
            for index in range(num_choices)
        ]
        self.generation = Generation(self.engine, self.metrics, self.choices, 0.02, self._ended)

    def _ended(self) -> None:
        self.num_ends += 1

    def say(self, text: str, place: int = 0, token: int = 7) -> None:
        client, generate, _ = self.engine.submitted[place]
        client.hear(Generated(generate.request, [token], text))

    def finish(self, reason: FinishReason, place: int = 0, sentence: str = "") -> None:
        client, generate, _ = self.engine.submitted[place]
        client.hear(Finished(generate.request, reason, RequestStats(), "", sentence))

    async def next(self, stream: Any) -> list[Piece]:
        return cast("list[Piece]", await anext(stream))


def play(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(cast("Any", story()))


def test_pieces_silence_and_the_end() -> None:
    async def story() -> None:
        scene = Scene()
        await scene.generation.start()
        stream = scene.generation.pieces()
        assert await scene.next(stream) == []  # silence
        scene.say("one ")
        scene.say("two")
        pieces = await scene.next(stream)
        assert [piece.text for piece in pieces] == ["one ", "two"]
        scene.finish("length")
        [last] = await scene.next(stream)
        assert (last.text, last.finish_reason) == ("", "length")
        with pytest.raises(StopAsyncIteration):
            await scene.next(stream)
        scene.generation.end()
        scene.generation.end()
        assert scene.num_ends == 1
        assert scene.engine.cancelled == []
        assert scene.metrics.num_ended == {"length": 1}
        assert scene.metrics.num_generated_tokens == 2

    play(story)


def test_a_stop_string_cancels_and_swallows_what_comes_late() -> None:
    async def story() -> None:
        scene = Scene(stops=("END",))
        await scene.generation.start()
        stream = scene.generation.pieces()
        scene.say("a E")
        assert [piece.text for piece in await scene.next(stream)] == ["a "]
        scene.say("ND b")
        scene.say("late")
        [last] = await scene.next(stream)
        assert (last.text, last.finish_reason) == ("", "stop")
        assert scene.engine.cancelled == [scene.choices[0].name]
        assert scene.choices[0].num_tokens == 2
        scene.finish("cancelled")
        scene.generation.end()
        assert scene.metrics.num_ended == {"stop": 1}

    play(story)


def test_what_was_held_back_for_a_stop_comes_with_the_end() -> None:
    async def story() -> None:
        scene = Scene(stops=("END",))
        await scene.generation.start()
        scene.say("a EN")
        scene.finish("stop")
        pieces = await scene.next(scene.generation.pieces())
        assert [(piece.text, piece.finish_reason) for piece in pieces] == [
            ("a ", None),
            ("EN", "stop"),
        ]

    play(story)


def test_a_client_that_goes_ends_all_choices_that_are_open() -> None:
    async def story() -> None:
        scene = Scene(num_choices=2)
        await scene.generation.start()
        stream = scene.generation.pieces()
        scene.finish("stop", place=0)
        await scene.next(stream)
        scene.generation.abandon()
        with pytest.raises(StopAsyncIteration):
            await scene.next(stream)
        scene.generation.end()
        assert set(scene.engine.cancelled) == {scene.choices[1].name}
        assert scene.metrics.num_ended == {"stop": 1, "abort": 1}

    play(story)


def test_a_fault_of_the_pipeline_is_told_with_its_sentence() -> None:
    async def story() -> None:
        scene = Scene()
        await scene.generation.start()
        scene.finish("error", sentence="The river ran dry.")
        with pytest.raises(ApiError, match="The river ran dry"):
            await scene.next(scene.generation.pieces())

    play(story)


def test_a_choice_that_is_refused_takes_the_others_back() -> None:
    async def story() -> None:
        scene = Scene(num_choices=2)
        scene.choices[1].max_tokens = 0
        with pytest.raises(ApiError) as caught:
            await scene.generation.start()
        assert caught.value.status == 400
        scene.generation.end()
        assert scene.engine.cancelled == [scene.choices[0].name]

    play(story)
