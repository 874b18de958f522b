"""One conversation -> token ids, and which of them are trained on: the answers and their end tokens.

The model folder's own template renders the conversation once. Turns are found on that rendering, so a template that
drops earlier reasoning cannot shift a mask, and none needs generation tags. Only what the template itself wrote becomes
a control token: a message that spells one is broken up before the rendering and mended after it.
"""

from __future__ import annotations

import json
import re
from typing import Any

COLUMNS = ("messages", "conversations", "tools", "system")
ROLES = {
    "system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
    "tool": "tool", "observation": "tool", "function_call": "assistant",
}  # fmt: skip
START, END = "<|im_start|>", "<|im_end|>"  # of a turn, in Qwen's and every other ChatML template
HEADER = "assistant\n"
# Private use: into the spelling of a control token, taken out after the rendering; around numbers of texts to find.
BREAK, MARK = "\ue000", "\ue001"
LABELS = {"role", "from", "id", "type", "tool_call_id"}  # say what a message is; a template need not show them
DROPPED_REASONING = "reasoning of earlier turns, which the template does not show"


def encode_conversation(row: dict[str, Any], tokenizer: Any) -> tuple[list[int], str | None]:
    """A row with `messages` or `conversations` -> ([T] token ids, ~id where not trained on; a note or None).

    Raises ValueError with the reason for what is no conversation, and for what the template does not express.
    """
    messages, tools = read_messages(row)
    control = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special]
    messages, tools = break_control_tokens((messages, tools), control)
    text = render(tokenizer, messages, tools)
    note = find_dropped(tokenizer, messages, tools, text)
    ids, turns = encode_rendered(text, tokenizer, control)
    answers = sum(message["role"] == "assistant" for message in messages)
    if turns != answers:
        raise ValueError(f"the template rendered {turns} assistant turns of {answers}; is it a ChatML template?")
    return ids, note


# ----- what the row holds -----


def read_messages(row: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """(messages in Transformers' form, tools or None) from either form of a row."""
    forms = [name for name in ("messages", "conversations") if row.get(name) is not None]
    if len(forms) != 1:
        which = f"both {forms[0]!r} and {forms[1]!r}" if forms else "neither 'messages' nor 'conversations'"
        raise ValueError(f"holds {which}; columns: {list(row)}")
    turns = row[forms[0]]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError(f"column {forms[0]!r} must be a list of messages with at least one")
    messages = [read_message(turn, number) for number, turn in enumerate(turns)]
    if system := row.get("system"):
        if not isinstance(system, str) or messages[0]["role"] == "system":
            raise ValueError("column 'system' must be text, and no system message may stand beside it")
        messages.insert(0, {"role": "system", "content": system})
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("holds no assistant turn: there is nothing to train on")
    tools = row.get("tools") or None
    if isinstance(tools, str):
        tools = parse_json(tools, "column 'tools'") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError("column 'tools' must be a list of JSON objects, or a string that holds one")
    return messages, tools


def read_message(turn: dict[str, Any], number: int) -> dict[str, Any]:
    """One message in Transformers' form: role, content as text, tool calls with their arguments as objects."""
    where, said = f"message {number}", turn.get("role", turn.get("from"))
    if not isinstance(said, str) or said not in ROLES:
        raise ValueError(f"{where} has role {said!r}; allowed are {', '.join(ROLES)}")
    message = {key: value for key, value in turn.items() if value is not None and key not in ("from", "value")}
    message["role"], content = ROLES[said], turn.get("content", turn.get("value"))
    if said == "function_call":
        calls = parse_json(content, where) if isinstance(content, str) else content
        message["tool_calls"], content = calls if isinstance(calls, list) else [calls], None
    reasoning = [name for name in ("reasoning_content", "thinking", "reasoning") if name in message]
    if len(reasoning) > 1:
        raise ValueError(f"{where}: fields {reasoning} mean the same: keep one")
    if reasoning:  # Transformers knows the other names too
        message["reasoning_content"] = message.pop(reasoning[0])
    if isinstance(content, list):  # parts
        if not all(isinstance(p, dict) and p.get("type", "text") == "text" and "text" in p for p in content):
            raise ValueError(f"{where}: parts of the content must be text, as {{'type': 'text', 'text': ...}}")
        content = "".join(part["text"] for part in content)
    if content is None and (message.get("tool_calls") or message.get("reasoning_content")):
        content = ""
    if not isinstance(content, str):
        raise ValueError(f"{where}: the content is {type(content).__name__}, expected text")
    message["content"] = content
    if "tool_calls" in message:
        if not isinstance(message["tool_calls"], list) or message["role"] != "assistant":
            raise ValueError(f"{where}: tool_calls must be a list, in a turn of the assistant")
        message["tool_calls"] = [read_call(call, where) for call in message["tool_calls"]]
    return message


def read_call(call: Any, where: str) -> dict[str, Any]:
    """{"function": {"name", "arguments": object}} from either form of a tool call."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: a tool call must be an object with 'name' and 'arguments'")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # given as JSON: a template would write it as a string inside JSON
        arguments = parse_json(arguments, f"{where}: arguments of {function['name']}")
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: arguments of {function['name']} are {type(arguments).__name__}, expected an object")
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def parse_json(text: str, where: str) -> Any:
    """The value that a string holds as JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is no valid JSON: {error}") from None


# ----- what the template makes of it -----


def break_control_tokens(value: Any, control: list[str]) -> Any:
    """The value with BREAK inside every control token that a string of it spells."""
    if isinstance(value, str):
        value.encode()  # JSON may hold half of a surrogate pair
        if BREAK in value or MARK in value:
            raise ValueError(f"holds the private-use character {BREAK!r} or {MARK!r}, which are needed here")
        for token in control:
            value = value.replace(token, token[0] + BREAK + token[1:])
        return value
    if isinstance(value, dict):
        return {break_control_tokens(k, control): break_control_tokens(v, control) for k, v in value.items()}
    return type(value)(break_control_tokens(v, control) for v in value) if isinstance(value, list | tuple) else value


def render(tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
    """The whole conversation as text, by the template of the model folder."""
    if not tokenizer.chat_template:
        raise ValueError("the model folder has no chat template: copy chat_template.jinja of a chat model into it")
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    except Exception as error:  # Jinja's classes, and whatever a template does with what it gets
        raise ValueError(f"the chat template refuses it: {error}") from None


def find_dropped(tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any] | None, text: str) -> str | None:
    """Raise ValueError for what the row holds and the rendering does not; earlier reasoning is only noted.

    One more rendering, of a copy with a mark in every text that must show. Fields that only some templates know were
    dropped if the rendering is the same without them.
    """
    if tools and render(tokenizer, messages, None) == text:
        raise ValueError("the template does not show the tools")
    places: list[tuple[int, str]] = []

    def marked(value: str, number: int, field: str) -> str:
        if not value.strip():
            return value
        places.append((number, field))
        middle = len(value) // 2  # templates look at how a text begins and ends
        return value[:middle] + f"{MARK}{len(places) - 1}{MARK}" + value[middle:]

    copies, dropped = [], []
    for number, message in enumerate(messages):
        copy = dict(message)
        if message["role"] == "assistant" and "</think>" in message["content"]:
            reasoning, _, answer = message["content"].rpartition("</think>")
            reasoning, answer = marked(reasoning, number, "reasoning_content"), marked(answer, number, "content")
            copy["content"] = f"{reasoning}</think>{answer}"
        else:
            copy["content"] = marked(message["content"], number, "content")
        if isinstance(message.get("reasoning_content"), str):
            copy["reasoning_content"] = marked(message["reasoning_content"], number, "reasoning_content")
        if "tool_calls" in message:
            copy["tool_calls"] = [
                call | {"function": {
                    "name": marked(call["function"]["name"], number, "tool_calls"),
                    "arguments": call["function"]["arguments"] | {marked("key", number, "tool_calls"): 0},
                }}
                for call in message["tool_calls"]
            ]  # fmt: skip
        copies.append(copy)
        known = LABELS | {"content", "reasoning_content", "tool_calls"}
        known |= {"name"} if message["role"] == "tool" else set()  # the call that it answers names the function
        for field in message.keys() - known:
            without = {key: value for key, value in message.items() if key != field}
            if render(tokenizer, [*messages[:number], without, *messages[number + 1 :]], tools) == text:
                dropped.append((number, field))
    shown = render(tokenizer, copies, tools)
    dropped += [place for i, place in enumerate(places) if f"{MARK}{i}{MARK}" not in shown]
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    for number, field in dropped:
        if field != "reasoning_content" or number > last_user:
            raise ValueError(f"message {number}: the template does not show its field {field!r}")
    return DROPPED_REASONING if dropped else None


def encode_rendered(text: str, tokenizer: Any, control: list[str]) -> tuple[list[int], int]:
    """([T] token ids, ~id where not trained on; number of assistant turns) of a rendered conversation.

    Trained on is every token that holds a character of an answer, and the <|im_end|> that ends it. Where the line end
    of the header and the start of the answer are one token, that token counts.
    """
    ids: list[int] = []
    turns, answering, before = 0, False, ""
    for piece in re.split("(" + "|".join(map(re.escape, control)) + ")", text):
        if piece in control:
            token = tokenizer.convert_tokens_to_ids(piece)
            ids.append(token if answering else ~token)
            answering = answering and piece != END
        elif piece:
            piece = piece.replace(BREAK, "")
            start = 0 if answering else len(piece)
            if before == START and piece.startswith(HEADER):
                turns, answering, start = turns + 1, True, len(HEADER)
            encoded = tokenizer(
                piece, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False
            )
            ends = (end for _, end in encoded["offset_mapping"])
            ids += [i if end > start else ~i for i, end in zip(encoded["input_ids"], ends, strict=True)]
        before = piece
    if answering:
        raise ValueError(f"the template does not end the last assistant turn with {END}")
    return ids, turns
