/** Numbers, times and dates in words. */

const number = new Intl.NumberFormat("en");
const DAY = 24 * 60 * 60;

/** "182 tokens · 40 of 52 prompt tokens from cache · 3.4 s · 54 tokens/s" */
export function numbersOf({ usage, took, seconds }) {
  if (!usage) return "";
  const parts = [`${number.format(usage.output)} ${usage.output === 1 ? "token" : "tokens"}`];
  if (usage.prompt) parts.push(`${number.format(usage.cached)} of ${number.format(usage.prompt)} prompt tokens from cache`);
  if (took) parts.push(`${took.toFixed(took < 10 ? 1 : 0)}\u00a0s`, `${number.format(Math.round(usage.output / took))} tokens/s`);
  else if (seconds) parts.push(`${seconds}\u00a0s`);
  return parts.join(" · ");
}

/** The heading a conversation of that time stands under, newest first. */
export function ageOf(seconds, now = Date.now() / 1000) {
  const midnight = new Date(now * 1000).setHours(0, 0, 0, 0) / 1000;
  if (seconds >= midnight) return "Today";
  if (seconds >= midnight - DAY) return "Yesterday";
  if (seconds >= midnight - 7 * DAY) return "Last 7 days";
  return "Earlier";
}
