/*
 * The requests to `mpsctl web`, which serves this page.
 *
 * The page exchanges the link's token for a session once. It keeps the session for this tab alone, and sends it as a
 * header: a browser would send a cookie to every other server on this address too, on any port.
 */

const KEY = "mpsctl-web-session";

/** A refusal: `status`, `code`, `detail` and `hint`, as in the API. */
export class Refused extends Error {
  constructor(status, problem) {
    super(problem.detail);
    Object.assign(this, { status, code: problem.code, hint: problem.hint });
  }
}

/** Return the text of an error for the user. */
export const explained = (error) => (error.hint ? `${error.message} (${error.hint})` : error.message);

export const hasSession = () => sessionStorage.getItem(KEY) !== null;
export const forget = () => sessionStorage.removeItem(KEY);

/** Open a session with the link's token, if the address has one, and remove the token from the address at once. */
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

/** Send a request, and return the answer's JSON, or null. Throws Refused, or TypeError if there is no answer. */
export async function ask(method, path, body) {
  const answer = await send(method, path, body, AbortSignal.timeout(30000));
  return answer.status === 204 ? null : answer.json();
}

/** Yield the decoded lines of an answer as they arrive; null for an empty line. */
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
