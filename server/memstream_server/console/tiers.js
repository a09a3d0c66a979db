// The tiers of a memory as its events change them. Pure values: no document, no network.

/** Fragments shown of a tier. */
export const SHOWN_MAX = 60;
const HELD_MAX = 2_000;

const LEAVES = new Set(["FILTERED", "DROPPED", "MERGED", "FORGOTTEN", "ERASED"]);
const NAMES = { TIER_SENSORY: "sensory", TIER_SHORT_TERM: "shortTerm", TIER_LONG_TERM: "longTerm" };

/** A memory's tiers. `held` has a bound: of long-term only the fragments that were seen last. */
export class Tiers {
  constructor(stats, fragments) {
    this.correct(stats);
    this.held = { sensory: new Map(), shortTerm: new Map(), longTerm: new Map() };
    for (const fragment of fragments) this.#hold(NAMES[fragment.tier], fragment);
  }

  /** Takes the counts of the server, which are of the same revision. */
  correct(stats) {
    const { sensory, shortTerm, longTerm } = stats;
    this.counts = { sensory: Number(sensory ?? 0), shortTerm: Number(shortTerm ?? 0), longTerm: Number(longTerm ?? 0) };
  }

  /** Applies one event. `fragment` is the fragment as it is now, if the watch sent it. */
  apply(event, fragment) {
    const type = event.type.replace("EVENT_TYPE_", "");
    const id = event.fragmentId;
    const to = NAMES[event.toTier];
    if (LEAVES.has(type)) {
      // A forgotten fragment that is erased later had left already.
      const from = this.#tierOf(id) ?? (type === "ERASED" ? undefined : NAMES[event.fromTier]);
      this.#leave(from, id);
    } else if (to && ["OBSERVED", "ADMITTED", "PROMOTED", "REFLECTED", "RESTORED", "IMPORTED"].includes(type)) {
      const from = this.#tierOf(id) ?? NAMES[event.fromTier];
      const known = from && this.held[from].get(id);
      this.#leave(from, id);
      if (type === "IMPORTED" && event.imported?.forgotten) return;
      this.counts[to] += 1;
      this.#hold(to, { ...known, ...fragment, id, tier: event.toTier });
    } else if (fragment) {
      const from = this.#tierOf(id);
      if (from) this.held[from].set(id, { ...fragment, tier: this.held[from].get(id).tier });
    }
  }

  #tierOf(id) {
    return Object.keys(this.held).find((name) => this.held[name].has(id));
  }

  #leave(tier, id) {
    if (!tier) return;
    this.held[tier].delete(id);
    this.counts[tier] = Math.max(0, this.counts[tier] - 1);
  }

  #hold(tier, fragment) {
    if (!tier) return;
    const held = this.held[tier];
    held.set(fragment.id, fragment);
    const bound = tier === "longTerm" ? SHOWN_MAX : HELD_MAX;
    while (held.size > bound) held.delete(held.keys().next().value);
  }
}
