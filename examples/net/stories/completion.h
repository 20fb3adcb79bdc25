// completion.h: what a client asks for, in the body of POST /v1/completions as OpenAI's clients send it:
//
//     {"prompt": "Once upon a time", "max_tokens": 200, "temperature": 0.8, "seed": 7, "stream": true}
//
// A prompt is text where tokens are bytes, or an array of token ids. A field that would change the answer and is not supported is
// refused, not ignored.
#ifndef STORIES_COMPLETION_H
#define STORIES_COMPLETION_H

#include "json.h"
#include "model.h"

struct Completion {
    unsigned prompt; // tokens of it
    unsigned most;   // tokens to make
    float temperature;
    uint64_t seed;
    bool stream;
    const char *refusal; // a sentence, or NULL
};

class CompletionReader {
public:
    // `tokens`: room for Shape::context of them. Without a seed it is `seed`.
    __device__ CompletionReader(const Shape &shape, int *tokens, uint64_t seed) : shape(shape), tokens(tokens), asked{0, 256, 0.8f, seed, false, nullptr}
    {
        if (shape.begin >= 0)
            add(shape.begin);
    }

    __device__ Completion read(const char *body, size_t length)
    {
        const unsigned before = asked.prompt;
        json::Reader in(body, length);
        json::View name;
        for (bool more = in.begin_object(); more && in.next_member(name);)
            read_member(in, name);
        if (in.bad || in.peek() || in.at != length)
            asked.refusal = "The body is not a JSON object with fields of the right types.";
        else if (!asked.refusal && asked.prompt == 0)
            asked.refusal = "There is no prompt.";
        else if (!asked.refusal && asked.prompt >= shape.context)
            asked.refusal = "The prompt is longer than the model's context.";
        else if (!asked.refusal && asked.prompt == before && !shape.is_of_bytes())
            asked.refusal = "There is no prompt.";
        return asked;
    }

private:
    const Shape &shape;
    int *tokens;
    Completion asked;

    __device__ void add(int token)
    {
        if (asked.prompt < shape.context)
            tokens[asked.prompt++] = token;
    }

    __device__ void read_member(json::Reader &in, json::View name)
    {
        if (json::is(name, "prompt")) {
            read_prompt(in);
        } else if (json::is(name, "max_tokens")) {
            const double most = in.number();
            if (most < 1)
                asked.refusal = "max_tokens must be at least 1.";
            asked.most = most < 1e9 ? unsigned(most) : 1000000000;
        } else if (json::is(name, "temperature")) {
            asked.temperature = float(in.number());
            if (!(asked.temperature >= 0 && asked.temperature <= 2))
                asked.refusal = "temperature must be from 0 to 2.";
        } else if (json::is(name, "seed")) {
            asked.seed = uint64_t(int64_t(in.number()));
        } else if (json::is(name, "stream")) {
            asked.stream = in.boolean();
        } else if (json::is(name, "n") || json::is(name, "best_of") || json::is(name, "top_p")) {
            if (in.number() != 1)
                asked.refusal = "n, best_of and top_p must be 1: this server makes one sequence, from all tokens.";
        } else if (json::is(name, "stop") || json::is(name, "suffix") || json::is(name, "logprobs") || json::is(name, "stream_options")) {
            if (in.peek() != 'n')
                asked.refusal = "stop, suffix, logprobs and stream_options are not supported.";
            in.skip();
        } else {
            in.skip();
        }
    }

    __device__ void read_prompt(json::Reader &in)
    {
        if (in.peek() == '"') {
            json::Characters text(in.string());
            for (int byte = text.next(); byte >= 0; byte = text.next())
                add(byte);
            in.bad = in.bad || text.bad;
            if (!shape.is_of_bytes())
                asked.refusal = "The tokens of this model are not bytes: the prompt must be an array of token ids.";
            return;
        }
        for (bool more = in.begin_array(); more && in.next_element();) {
            if (in.peek() == '"') {
                read_prompt(in);
                continue;
            }
            const double token = in.number();
            if (!(token >= 0 && token < shape.vocabulary))
                asked.refusal = "The prompt has a token that is not in the vocabulary.";
            else
                add(int(token));
        }
    }
};

#endif
