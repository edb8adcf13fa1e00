{{- define "prefill-operator.name" -}}
{{- if contains "prefill-operator" .Release.Name -}}
{{ .Release.Name | trunc 53 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-prefill-operator" (.Release.Name | trunc 36 | trimSuffix "-") }}
{{- end -}}
{{- end -}}

{{- define "prefill-operator.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "prefill-operator.selector" -}}
app.kubernetes.io/name: prefill-operator
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "prefill-operator.labels" -}}
app.kubernetes.io/name: prefill-operator
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: prefill-operator
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- with .Values.extraLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}
