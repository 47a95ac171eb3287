"""dspy: a prediction and its ReAct agent, by its chat format and by its JSON format."""
# players:
# dspy = ["dspy"]

import dspy
import parts

dspy.configure(lm=dspy.LM(f"openai/{parts.MODEL}", api_base=parts.BASE_URL, api_key=parts.KEY, cache=False))


def tools():
    return dspy.ReAct("question -> answer", tools=[parts.add], max_iters=3)(question=parts.QUESTION).answer


def predict():
    return dspy.Predict("question -> answer")(question=parts.QUESTION).answer


def structured():
    with dspy.context(adapter=dspy.JSONAdapter()):
        return dspy.Predict("question -> total: int")(question=parts.QUESTION).total


parts.play(tools=tools, predict=predict, structured=structured)
