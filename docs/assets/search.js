// Searches find sections with all words of a query. If there is none, they find sections with any of the words.
{
  const QUERY = 2, RESULT = 3; // types of the search worker's messages
  const SEPARATOR = /[\s\-_.,:;=/()\[\]{}?!`"<>]+/; // as in mkdocs.yml
  const OPERATORS = /(^|\s)[+-]\S|["~^*]/; // queries with these stay as they are
  const STOP_WORDS = new Set(
    ("able about across after all almost also am among an and any are as at be because been but by can cannot could dear did do " +
    "does either else ever every for from get got had has have he her hers him his how however if in into is it its just least let " +
    "like likely may me might most must my neither no nor not of off often on only or other our own rather said say says she should " +
    "since so some than that the their them then there these they this tis to too twas us wants was we were what when where which " +
    "while who whom why will with would yet you your a i").split(" "), // lunr's, which are not in the index
  );
  window.Worker = class extends window.Worker {
    asked = []; // for each query without an answer: the query to ask if the answer is empty, if any
    constructor(...given) {
      super(...given);
      this.addEventListener("message", (event) => {
        if (event.data.type !== RESULT) return;
        const loose = this.asked.shift();
        if (loose && !this.asked.length && !event.data.data.items.length) {
          event.stopImmediatePropagation();
          this.ask(loose);
        }
      });
    }
    ask(query, loose) {
      this.asked.push(loose);
      super.postMessage({ type: QUERY, data: query });
    }
    postMessage(message) {
      if (message.type !== QUERY) return super.postMessage(message);
      const words = message.data.toLowerCase().split(SEPARATOR).filter((word) => word && !STOP_WORDS.has(word));
      if (words.length < 2 || OPERATORS.test(message.data)) this.ask(message.data);
      else this.ask(words.map((word) => `+${word}*`).join(" "), message.data);
    }
  };
}
