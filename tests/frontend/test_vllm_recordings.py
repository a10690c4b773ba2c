"""Seconds of recordings that vLLM's routes of speech decode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvmig.asgi.call import HttpCall
from kvmig.frontend.openai.vllm.recordings import count_recordings
from tests.support.http_calls import in_call


class Speech:
    """vLLM's object, as far as it decodes."""

    async def _preprocess_speech_to_text(self, *, request: Any) -> tuple[list[str], float, Any]:
        return ["prompt"], request.duration_s, [0.0]


async def test_what_is_decoded_counts_for_its_call_and_each_recording_is_rounded_up() -> None:
    speech, calls = Speech(), [HttpCall("a"), HttpCall("b")]
    count_recordings(speech)
    for call, duration_s in ((calls[0], 7.3), (calls[1], 60.0), (calls[1], 0.1)):
        request = SimpleNamespace(duration_s=duration_s)
        with in_call(call):
            said = await speech._preprocess_speech_to_text(request=request)
        assert said == (["prompt"], duration_s, [0.0])
    assert [one.seconds for one in calls] == [8, 61]


async def test_what_is_decoded_for_no_call_counts_nowhere() -> None:
    speech = Speech()
    count_recordings(speech)
    said = await speech._preprocess_speech_to_text(request=SimpleNamespace(duration_s=1.0))
    assert said == (["prompt"], 1.0, [0.0])


def test_a_model_without_recordings_has_nothing_to_count() -> None:
    count_recordings(None)
