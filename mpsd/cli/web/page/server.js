/*
 * What is asked of `mpsctl web`, which serves this page.
 *
 * The link's token is exchanged for a session once. The session is kept for this tab alone, and sent as a header: a
 * cookie would go to every other server on this address too, whatever its port.
 */

const KEY = "mpsctl-web-session";

/** An answer that is no success: `status`, `code`, `detail` and `hint`, as the API has them. */
export class Refused extends Error {
  constructor(status, problem) {
    super(problem.detail);
    Object.assign(this, { status, code: problem.code, hint: problem.hint });
  }
}

/** Return what an error says to a reader. */
export const explained = (error) => (error.hint ? `${error.message} (${error.hint})` : error.message);

export const hasSession = () => sessionStorage.getItem(KEY) !== null;
export const forget = () => sessionStorage.removeItem(KEY);

/** Open a session with the token of the link, if this page was opened by one; the token leaves the address at once. */
export async function openSession() {
  const found = /^#token=([\w-]+)$/.exec(location.hash);
  if (found === null) return;
  history.replaceState(null, "", "#/");
  const { session } = await ask("POST", "/page/session", { token: found[1] });
  sessionStorage.setItem(KEY, session);
}

async function send(method, path, body, signal) {
  const headers = {};
  if (hasSession()) headers.Authorization = `Bearer ${sessionStorage.getItem(KEY)}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, {
    method,
    headers,
    signal,
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
    credentials: "omit",
    redirect: "error",
  });
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => ({ detail: `the answer was HTTP status ${answer.status}` }));
  throw new Refused(answer.status, problem);
}

/** Ask, and return the JSON of the answer; null where it has none. Throws Refused, and TypeError without an answer. */
export async function ask(method, path, body) {
  const answer = await send(method, path, body, AbortSignal.timeout(30000));
  return answer.status === 204 ? null : answer.json();
}

/** Yield the lines of an answer as they come, decoded; null for an empty one. */
export async function* linesOf(path) {
  const answer = await send("GET", path);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) yield line === "" ? null : JSON.parse(line);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
