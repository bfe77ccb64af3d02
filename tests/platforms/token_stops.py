"""A response that has a comparison and then a call, in SGLang's own record of a request."""

from __future__ import annotations

import gc
import weakref


def response() -> str:
    """How long it is where SGLang stops on ">": after "x > 3", and of "</code>".

    And whether the request is freed when nobody holds it.
    """
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    from retool_mcore.platforms.call_end import TABLE, CallEnd

    call_end = CallEnd.of({"</": 1, "code": 2, ">": 3, "x": 4}, "</code>")
    params = SamplingParams(stop_token_ids=[3], custom_params={TABLE: call_end.text})
    request = Req("0", "", [9], params)
    request.output_ids.extend([4, 3, 4, 1, 2, 3, 4])  # as a speculative step accepts them
    found = f"{request._check_token_based_finish(request.output_ids[:])}, {request.finished_len} tokens"
    alive = weakref.ref(request)
    gc.disable()
    del request
    freed = alive() is None
    gc.enable()
    return f"{found}, freed {freed}"
