"use strict";
// The text that is packed in an element, at once.
const unpacked = (() => {
  // Five characters are four bytes; what is missing of the last five is missing of the bytes.
  const DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;,=>?@^_`{|}~";
  function fromBase85(text) {
    const values = new Uint8Array(128);
    for (let digit = 0; digit < DIGITS.length; digit++) values[DIGITS.charCodeAt(digit)] = digit;
    const groups = Math.ceil(text.length / 5);
    const bytes = new DataView(new ArrayBuffer(4 * groups));
    for (let group = 0; group < groups; group++) {
      let number = 0;
      for (let place = 5 * group; place < 5 * group + 5; place++) {
        number = 85 * number + (place < text.length ? values[text.charCodeAt(place)] : 84);
      }
      bytes.setUint32(4 * group, number);
    }
    return new Uint8Array(bytes.buffer, 0, 4 * groups - (5 * groups - text.length));
  }

  // What gzip compressed (RFC 1951, 1952). The browser's own DecompressionStream answers later, and paper does not wait.
  const GZIP_MAGIC = 31;
  const GZIP_HEADER = 10;
  const DAMAGED = "what is packed in the page is damaged";
  const LENGTH_OF_LENGTHS_ORDER = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];
  // A length or distance begins at the sum of the ranges before it, each 2 to the power of its extra bits.
  const begins = (first, extra) => extra.reduce((sums, bits) => [...sums, sums.at(-1) + 2 ** bits], [first]);
  const EXTRA_OF_LENGTH = Array.from({ length: 29 }, (_, code) => (code < 28 ? Math.max(0, (code >> 2) - 1) : 0));
  const EXTRA_OF_DISTANCE = Array.from({ length: 30 }, (_, code) => Math.max(0, (code >> 1) - 1));
  const LENGTHS = [...begins(3, EXTRA_OF_LENGTH).slice(0, 28), 258];
  const DISTANCES = begins(1, EXTRA_OF_DISTANCE);
  const FIXED = [
    Array.from({ length: 288 }, (_, symbol) => (symbol < 144 ? 8 : symbol < 256 ? 9 : symbol < 280 ? 7 : 8)),
    new Array(32).fill(5),
  ];

  // By the next bits of the stream, the symbol that begins there (from bit 4 on) and how many bits it has.
  function huffman(lengths) {
    const most = Math.max(1, ...lengths);
    const table = new Uint16Array(2 ** most);
    let code = 0;
    for (let length = 1; length <= most; length++, code <<= 1) {
      for (const [symbol, own] of lengths.entries()) {
        if (own !== length) continue;
        let reversed = 0;
        for (let bit = 0; bit < length; bit++) reversed |= ((code >> bit) & 1) << (length - 1 - bit);
        for (let bits = reversed; bits < table.length; bits += 2 ** length) table[bits] = (symbol << 4) | length;
        code++;
      }
    }
    return { table, most };
  }

  function inflated(bytes) {
    if (bytes[0] !== GZIP_MAGIC) throw new Error(DAMAGED);
    const output = new Uint8Array(new DataView(bytes.buffer, bytes.byteOffset + bytes.length - 4).getUint32(0, true));
    let place = GZIP_HEADER;
    let written = 0;
    let bits = 0;
    let held = 0;
    function drop(count) {
      bits >>>= count;
      held -= count;
    }
    function peek(count) {
      for (; held < count; held += 8) bits |= bytes[place++] << held;
      return bits & (2 ** count - 1);
    }
    function take(count) {
      const value = peek(count);
      drop(count);
      return value;
    }
    function symbolOf({ table, most }) {
      const entry = table[peek(most)];
      if (!entry) throw new Error(DAMAGED);
      drop(entry & 15);
      return entry >> 4;
    }
    function stored() {
      place -= held >> 3;
      bits = held = 0;
      const size = bytes[place] | (bytes[place + 1] << 8);
      output.set(bytes.subarray(place + 4, place + 4 + size), written);
      place += 4 + size;
      written += size;
    }
    function ownCodes() {
      const [numLiterals, numDistances, numLengths] = [take(5) + 257, take(5) + 1, take(4) + 4];
      const ofLengths = new Array(19).fill(0);
      for (const symbol of LENGTH_OF_LENGTHS_ORDER.slice(0, numLengths)) ofLengths[symbol] = take(3);
      const code = huffman(ofLengths);
      const lengths = [];
      while (lengths.length < numLiterals + numDistances) {
        const symbol = symbolOf(code);
        if (symbol < 16) lengths.push(symbol);
        else if (symbol === 16) lengths.push(...new Array(take(2) + 3).fill(lengths.at(-1)));
        else lengths.push(...new Array(symbol === 17 ? take(3) + 3 : take(7) + 11).fill(0));
      }
      return [lengths.slice(0, numLiterals), lengths.slice(numLiterals)];
    }
    // Most of the time is spent here: the stream's state is in variables of its own, which engines keep in registers.
    function compressed(lengths) {
      const [{ table: literals, most: mostOfLiteral }, { table: distances, most: mostOfDistance }] = lengths.map(huffman);
      const [literalMask, distanceMask] = [2 ** mostOfLiteral - 1, 2 ** mostOfDistance - 1];
      let [next, end, ahead, count] = [place, written, bits, held];
      for (;;) {
        for (; count < mostOfLiteral; count += 8) ahead |= bytes[next++] << count;
        if (next > bytes.length) throw new Error(DAMAGED);
        const entry = literals[ahead & literalMask];
        ahead >>>= entry & 15;
        count -= entry & 15;
        const symbol = entry >> 4;
        if (symbol < 256) {
          if (!entry) throw new Error(DAMAGED);
          output[end++] = symbol;
          continue;
        }
        if (symbol === 256) break;
        let extra = EXTRA_OF_LENGTH[symbol - 257];
        for (; count < extra; count += 8) ahead |= bytes[next++] << count;
        const stop = end + LENGTHS[symbol - 257] + (ahead & ((1 << extra) - 1));
        ahead >>>= extra;
        count -= extra;
        for (; count < mostOfDistance; count += 8) ahead |= bytes[next++] << count;
        const code = distances[ahead & distanceMask];
        ahead >>>= code & 15;
        count -= code & 15;
        extra = EXTRA_OF_DISTANCE[code >> 4];
        for (; count < extra; count += 8) ahead |= bytes[next++] << count;
        const distance = DISTANCES[code >> 4] + (ahead & ((1 << extra) - 1));
        ahead >>>= extra;
        count -= extra;
        for (; end < stop; end++) output[end] = output[end - distance];
      }
      [place, written, bits, held] = [next, end, ahead, count];
    }
    for (let isLast = 0; !isLast; ) {
      isLast = take(1);
      if (place > bytes.length) throw new Error(DAMAGED);
      const kind = take(2);
      if (kind === 0) stored();
      else compressed(kind === 1 ? FIXED : ownCodes());
    }
    return output;
  }

  return (id) => new TextDecoder().decode(inflated(fromBase85(document.getElementById(id).textContent)));
})();
