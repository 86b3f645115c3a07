"""A server that answers every request at once, for the bench's own test: stand_in.py PORT."""

import json
import sys

from aiohttp import web


async def models(_request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "stand-in"}]})


async def completions(request: web.Request) -> web.StreamResponse:
    """As many tokens as were asked for; usage at the end, as OpenAI streams it."""
    body = await request.json()
    count = body["max_tokens"]
    response = web.StreamResponse()
    await response.prepare(request)
    events = [{"choices": [{"text": "x"}]} for _ in range(count)]
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
    for event in [*events, {"choices": [], "usage": usage}]:
        await response.write(b"data: %b\n\n" % json.dumps(event).encode())
    await response.write(b"data: [DONE]\n\n")
    return response


def main() -> None:
    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", completions)])
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()
