"""Libraries that hold models to a form, through their models for OpenAI's API: outlines and guidance.

A reply, a stream and a structured reply each. guidance streams by itself.
"""
# players:
# guidance = ["guidance", "openai"]
# outlines = ["outlines[openai]"]

import parts


def with_outlines():
    import openai
    import outlines

    model = outlines.from_openai(openai.OpenAI(api_key=parts.KEY), parts.MODEL)
    parts.play(
        plain=lambda: model(parts.QUESTION),
        stream=lambda: "".join(model.stream(parts.QUESTION)),
        structured=lambda: model(parts.QUESTION, parts.Total),
    )


def with_guidance():
    import guidance

    def ask(reply):
        lm = guidance.models.OpenAI(parts.MODEL, echo=False, api_key=parts.KEY, base_url=parts.BASE_URL)
        with guidance.user():
            lm += parts.QUESTION
        with guidance.assistant():
            lm += reply
        return lm["answer"]

    parts.play(
        stream=lambda: ask(guidance.gen("answer")),
        structured=lambda: ask(guidance.json("answer", schema=parts.Total)),
    )


with_outlines() if parts.NAME == "outlines" else with_guidance()
