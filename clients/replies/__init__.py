"""What a language model replies: its reading, and the writing of tool calls; all may enter, and floors above as well.

All of it is pure, and linear in its length.

A reply is read in this order, by environments, verifiers, checks and the agents' endpoint alike:

1. **Thinking is not the reply** (`thinking.py`).
2. **A reply counts by its end**: of what was said, the last `LONGEST` characters are read by environments, and an
   answer is looked for in the last `ANSWER_WITHIN` of them.
3. **Marks are found** (`marks.py`): pairs of tags, boxes, fences. Calls of tools are read in one of the `formats`.
"""
