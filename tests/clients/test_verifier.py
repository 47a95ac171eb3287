"""RemoteVerifier scores in batches."""


def item(number: int) -> dict[str, object]:
    return {
        "response": f"<answer>{number + number % 2}</answer>",
        "question": f"{number} + 0",
        "answer": number,
    }
