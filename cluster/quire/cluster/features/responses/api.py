"""``POST /v1/responses``, as one generates text with it."""

from quire.cluster.edge.call import ANSWER, QUESTION, Call, Heading
from quire.cluster.features.responses.format import ResponsesFormat
from quire.cluster.features.responses.schema import ResponsesBody
from quire.cluster.seams import TextCall

RESPONSES_CALL = TextCall(
    path="/v1/responses",
    body=ResponsesBody,
    format=ResponsesFormat,
    id_prefix="resp_",
    prompt_field="input",
    call=Call(
        "Generates the next items of a conversation (OpenAI's responses).",
        Heading.TEXT,
        ResponsesBody,
        streams=True,
        example={"input": QUESTION},
        answer={
            "id": "resp_b62514f7f7454c0f7dd48c10",
            "object": "response",
            "created_at": 1767225600,
            "status": "completed",
            "model": "NAME",
            "error": None,
            "incomplete_details": None,
            "output": [
                {
                    "id": "msg_b62514f7f7454c0f7dd48c10_0",
                    "type": "message",
                    "status": "completed",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": ANSWER, "annotations": []}],
                }
            ],
            "usage": {
                "input_tokens": 11,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": 10,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": 21,
            },
        },
    ),
)
