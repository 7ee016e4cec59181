"""The parts of known models' chat templates that render tool calls."""

HERMES = """
{%- for message in messages %}{% if message.role == "assistant" %}
{%- if message.content %}{{- message.content }}{% endif %}
{%- for tool_call in message.tool_calls %}
    {%- if tool_call.function is defined %}
        {%- set tool_call = tool_call.function %}
    {%- endif %}
    {{- '\\n<tool_call>\\n{"name": "' }}
    {{- tool_call.name }}
    {{- '", "arguments": ' }}
    {{- tool_call.arguments | tojson }}
    {{- '}\\n</tool_call>' }}
{%- endfor %}{% endif %}{% endfor %}"""

QWEN3_CODER = """
{%- for message in messages %}{% if message.role == "assistant" %}
{%- if message.content %}{{- message.content }}{% endif %}
{%- for tool_call in message.tool_calls %}
    {%- set tool_call = tool_call.function %}
    {{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
    {%- for args_name, args_value in tool_call.arguments|items %}
        {{- '<parameter=' + args_name + '>\\n' }}
        {%- set args_value = args_value | tojson | safe if args_value is mapping or
            (args_value is sequence and args_value is not string) else args_value | string %}
        {{- args_value }}
        {{- '\\n</parameter>\\n' }}
    {%- endfor %}
    {{- '</function>\\n</tool_call>' }}
{%- endfor %}{% endif %}{% endfor %}"""

GLM45 = """
{%- for message in messages %}{% if message.role == "assistant" %}
{%- if message.content %}{{- message.content }}{% endif %}
{% for tc in message.tool_calls %}
{%- set tc = tc.function %}
{{ '\\n<tool_call>' + tc.name }}
{% set _args = tc.arguments %}
{% for k, v in _args.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}{% endif %}{% endfor %}"""

MISTRAL = """
{%- for message in messages %}{% if message.role == "assistant" %}
{%- if message.content %}{{- message.content }}{% endif %}
{{- "[TOOL_CALLS] [" }}
{%- for tool_call in message.tool_calls %}
    {%- set out = tool_call.function|tojson %}
    {{- out[:-1] }}
    {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
        {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
    {%- endif %}
    {{- ', "id": "' + tool_call.id + '"}' }}
    {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
{%- endfor %}{% endif %}{% endfor %}"""

MISTRAL_V11 = """
{%- for message in messages %}{% if message.role == "assistant" %}
{%- if message.content %}{{- message.content }}{% endif %}
{%- for tool_call in message.tool_calls %}
    {%- set arguments = tool_call.function.arguments %}
    {%- if arguments is not string %}{%- set arguments = arguments|tojson %}{%- endif %}
    {{- "[TOOL_CALLS]" + tool_call.function.name + "[ARGS]" + arguments }}
{%- endfor %}{% endif %}{% endfor %}"""

DEEPSEEK_V3 = """
{%- for message in messages %}{% if message['role'] == 'assistant' %}
{%- if message['content'] is not none %}{{- message['content'] }}{% endif %}
{%- for tool in message['tool_calls'] %}
{%- if loop.first %}{{- '<｜tool▁calls▁begin｜>' }}{%- else %}{{- '\\n' }}{% endif %}
{{- '<｜tool▁call▁begin｜>' + 'function' + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' +
    '```json' + '\\n' + tool['function']['arguments'] + '\\n' + '```' + '<｜tool▁call▁end｜>' }}
{%- endfor %}{{- '<｜tool▁calls▁end｜>' }}{% endif %}{% endfor %}"""

DEEPSEEK_V31 = """
{%- for message in messages %}{% if message['role'] == 'assistant' %}
{%- if message['content'] is not none %}{{- message['content'] }}{% endif %}
{{- '<｜tool▁calls▁begin｜>' }}
{%- for tool in message['tool_calls'] %}
{{- '<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' +
    tool['function']['arguments'] + '<｜tool▁call▁end｜>' }}
{%- endfor %}{{- '<｜tool▁calls▁end｜>' }}{% endif %}{% endfor %}"""

LLAMA3_JSON = """
{%- for message in messages %}{% if message.role == "assistant" %}
{%- for tool_call in message.tool_calls %}
    {%- set tool_call = tool_call.function %}
    {%- if not loop.first %}{{- "; " }}{% endif %}
    {{- '{"name": "' + tool_call.name + '", ' }}
    {{- '"parameters": ' }}
    {{- tool_call.arguments | tojson }}
    {{- "}" }}
{%- endfor %}{% endif %}{% endfor %}
{%- if false %}<|python_tag|>{% endif %}"""

KIMI_K2 = """
{%- for message in messages %}{% if message.role == "assistant" %}
{%- if message.content %}{{- message.content }}{% endif %}
{{- '<|tool_calls_section_begin|>' }}
{%- for tool_call in message.tool_calls %}
{%- set formatted_id = tool_call['id'] %}
{{- '<|tool_call_begin|>' + formatted_id + '<|tool_call_argument_begin|>' }}
{%- if tool_call['function']['arguments'] is string %}{{- tool_call['function']['arguments'] }}
{%- else %}{{- tool_call['function']['arguments'] | tojson }}{% endif %}
{{- '<|tool_call_end|>' }}
{%- endfor %}{{- '<|tool_calls_section_end|>' }}{% endif %}{% endfor %}"""

HARMONY = """
{%- for message in messages %}{% if message.role == "assistant" %}
{%- if message.content %}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.content + "<|end|>" }}
{%- endif %}
{%- for tool_call in message.tool_calls %}
    {%- set tool_call = tool_call.function %}
    {{- "<|start|>assistant to=" }}
    {{- "functions." + tool_call.name + "<|channel|>commentary " }}
    {{- "json<|message|>" }}
    {{- tool_call.arguments | tojson }}
    {{- "<|call|>" }}
{%- endfor %}{% endif %}{% endfor %}"""

GRANITE = """
{%- for message in messages %}{% if message.role == "assistant" %}
{%- if message.content %}{{- message.content }}{% endif %}
{{- "<|tool_call|>[" }}
{%- for tool_call in message.tool_calls %}
    {{- '{"name": "' + tool_call.function.name + '", "arguments": ' }}
    {{- tool_call.function.arguments | tojson + "}" }}
    {%- if not loop.last %}{{- ", " }}{% endif %}
{%- endfor %}{{- "]" }}{% endif %}{% endfor %}"""

FUNCTION_GEMMA = """
{%- macro written(value) -%}
    {%- if value is string -%} {{- '<escape>' + value + '<escape>' -}}
    {%- elif value is boolean -%} {{- 'true' if value else 'false' -}}
    {%- elif value is mapping -%}
        {{- '{' -}}
        {%- for name, each in value | dictsort -%}
            {{- name + ':' + written(each) -}}{{- ',' if not loop.last -}}
        {%- endfor -%}
        {{- '}' -}}
    {%- elif value is sequence -%}
        {{- '[' -}}
        {%- for each in value -%}
            {{- written(each) -}}{{- ',' if not loop.last -}}
        {%- endfor -%}
        {{- ']' -}}
    {%- else -%} {{- value -}}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages %}{% if message.role == "assistant" %}
{%- if message.content %}{{- message.content }}{% endif %}
{%- for tool_call in message.tool_calls %}
    {%- set call = tool_call.function %}
    {{- '<start_function_call>call:' + call.name + written(call.arguments) }}
    {{- '<end_function_call>' }}
{%- endfor %}{% endif %}{% endfor %}"""

GEMMA4 = FUNCTION_GEMMA
for _other, _mark in (
    ("<start_function_call>", "<|tool_call>"),
    ("<end_function_call>", "<tool_call|>"),
    ("<escape>", '<|"|>'),
):
    GEMMA4 = GEMMA4.replace(_other, _mark)

TEMPLATES = {
    "kimi_k2": KIMI_K2,
    "harmony": HARMONY,
    "granite": GRANITE,
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "glm45": GLM45,
    "mistral": MISTRAL,
    "mistral_v11": MISTRAL_V11,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "llama3_json": LLAMA3_JSON,
    "functiongemma": FUNCTION_GEMMA,
    "gemma4": GEMMA4,
}
"""Templates by format, as named in `quire.cluster.dialects.formats`. Pythonic calls have none: the
system prompt shows models their form."""

TAKE_TEXT = {"deepseek_v3", "deepseek_v31"}
"""Templates that concatenate arguments with text, and so need them as a JSON string."""
