// What a JSON schema says, as text and as rows of a table.

const NONE = new Set();

/** Return a schema with its references replaced by what they name; deep inside a recursive one a plain object. */
export function resolved(schema, document, depth = 0) {
  if (!schema || !schema.$ref) return schema ?? {};
  if (depth > 8) return { type: "object" };
  const name = schema.$ref.split("/").slice(1).map((part) => part.replaceAll("~1", "/").replaceAll("~0", "~"));
  return resolved(name.reduce((at, part) => at?.[part], document), document, depth + 1);
}

/** Return a schema without "or null", and whether it had it. */
function bare(schema, document) {
  const choices = (schema.anyOf ?? schema.oneOf ?? []).map((one) => resolved(one, document));
  const rest = choices.filter((one) => one.type !== "null");
  return { rest: rest.length === 1 ? { ...schema, anyOf: undefined, oneOf: undefined, ...rest[0] } : schema, choices: rest };
}

/** Return a type in words: "integer, 1 to 4096", "text or list of text". */
export function typeOf(given, document) {
  const schema = resolved(given, document);
  const { rest, choices } = bare(schema, document);
  if (choices.length > 1) return [...new Set(choices.map((one) => typeOf(one, document)))].join(" or ");
  if (rest.enum) return rest.enum.map((one) => JSON.stringify(one)).join(" | ");
  if ("const" in rest) return JSON.stringify(rest.const);
  if (rest.type === "array") {
    const [item, ...bounds] = rest.items ? typeOf(rest.items, document).split(", ") : ["anything"];
    return `list of ${item}${bounds.length ? ` (${bounds.join(", ")})` : ""}${counted(rest)}`;
  }
  if (rest.type === "string" && rest.format === "binary") return "file";
  const names = { string: "text", boolean: "true or false", object: "object", number: "number", integer: "integer", null: "null" };
  return (names[rest.type] ?? "anything") + ranged(rest);
}

function counted({ minItems, maxItems }) {
  return maxItems === undefined ? "" : `, ${minItems ? `${minItems} to ${maxItems}` : `at most ${maxItems}`}`;
}

function ranged({ minimum, exclusiveMinimum, maximum, exclusiveMaximum, maxLength }) {
  const low = minimum ?? exclusiveMinimum, high = maximum ?? exclusiveMaximum;
  if (maxLength !== undefined) return `, at most ${maxLength} characters`;
  const parts = [];
  // Bounds of the machine's integers say nothing to a reader.
  if (low > -(2 ** 31)) parts.push(exclusiveMinimum === undefined ? `from ${low}` : `above ${low}`);
  if (high < 2 ** 31) parts.push(maximum === undefined ? `below ${high}` : `to ${high}`);
  return parts.length ? `, ${parts.join(" ")}` : "";
}

/** Return the objects inside a field: their own, those of its choices, those of a list's items. */
export function objectsIn(given, document) {
  const schema = resolved(given, document);
  if (schema.properties) return [schema];
  if (schema.type === "array" && schema.items) return objectsIn(schema.items, document);
  return (schema.anyOf ?? schema.oneOf ?? []).flatMap((one) => objectsIn(one, document));
}

/** Return the fields of an object schema: {name, schema, needed}. */
export function fieldsOf(given, document) {
  const schema = resolved(given, document);
  const needed = new Set(schema.required ?? NONE);
  return Object.entries(schema.properties ?? {}).map(([name, field]) => ({ name, schema: resolved(field, document), needed: needed.has(name) }));
}

/** Return the least body that the schema takes, as far as one can tell. */
export function example(given, document, depth = 0) {
  const schema = resolved(given, document);
  if ("default" in schema && schema.default !== null) return schema.default;
  if (schema.examples?.length) return schema.examples[0];
  if ("const" in schema) return schema.const;
  if (schema.enum) return schema.enum[0];
  const { choices } = bare(schema, document);
  if (choices.length) return example(choices[0], document, depth);
  switch (schema.type) {
    case "object":
      return Object.fromEntries(fieldsOf(schema, document).filter((one) => one.needed).map((one) => [one.name, hint(one.name) ?? example(one.schema, document, depth + 1)]));
    case "array":
      return depth < 6 && schema.items ? [example(schema.items, document, depth + 1)] : [];
    case "integer":
    case "number":
      return schema.minimum ?? 1;
    case "boolean":
      return false;
    default:
      return "";
  }
}

function hint(name) {
  return { prompt: "Once upon a time", input: "What is 12 + 30?", role: "user", content: "What is 12 + 30?" }[name];
}
